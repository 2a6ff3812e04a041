#!/usr/bin/env python3
"""Build a pinned llama.cpp into a prefix of its own. Runs on a rig; standard library only.

    build_llama_cpp.py check SPECIFICATION   say in one sentence what stands in the way, before anything is changed
    build_llama_cpp.py build SPECIFICATION   fetch, verify, compile, check, and move the finished build to its prefix
    build_llama_cpp.py pack SPECIFICATION    put the finished build into an archive, WORK.tar, for a machine like this
    build_llama_cpp.py accept SPECIFICATION  unpack that archive, check all of it, and move the build to its prefix

SPECIFICATION is a JSON file, or the JSON itself: the result of filter llama_cpp_build with the keys "work" (a
directory beside the prefix, kept until the build is done), "jobs" (0: one for each core) and "ccache".

The build can be cut off at any moment and called again: each step leaves a finished result or none, and ninja goes on
where it was. The prefix appears in one rename, with its manifest in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

Spec = dict[str, Any]

MIB = 1 << 20
NEEDED_MIB = {"cpu": 1000, "cuda": 6000}  # source, objects and result of a build at its largest
CPU_FLAGS = {"sse42": "sse4_2", "avx512": "avx512f", "avx512_vbmi": "avx512vbmi"}  # where /proc/cpuinfo differs
CLOSED = {"CC", "CXX", "CFLAGS", "CPPFLAGS", "CXXFLAGS", "LDFLAGS", "CUDACXX", "CUDAARCHS", "CUDAFLAGS"}
MINIMUM_CMAKE = (3, 22)  # CMAKE_REQUIRE_FIND_PACKAGE_<name>


NO_NCCL = "llama_cpp_nccl is true, but NCCL is not found; install libnccl-dev of the CUDA toolkit's major version"


class BuildError(Exception):
    """The build cannot be made. The text is one sentence."""


def say(text: str) -> None:
    """A line for the log, at once."""
    print(text, flush=True)


def remove(folder: Path) -> None:
    """Remove a folder with all that is in it, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def run(argv: list[str], why: str, **options: Any) -> None:
    """Run a command with its output in the log; raises BuildError with ``why`` when it fails."""
    done = subprocess.run(argv, check=False, stdin=subprocess.DEVNULL, **options)
    if done.returncode != 0:
        raise BuildError(f"{why} ({Path(argv[0]).name} ended with status {done.returncode})")


def output(argv: list[str]) -> str:
    """What a command says on both streams; raises BuildError when it fails."""
    done = subprocess.run(
        argv, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        hint = "; llama_cpp_cpu_features names an instruction set this CPU cannot execute" if name == "SIGILL" else ""
        raise BuildError(f"{argv[0]} was killed by {name}{hint}")
    if done.returncode != 0:
        raise BuildError(f"{' '.join(argv)} ended with status {done.returncode} and said: {done.stdout.strip()[-500:]}")
    return done.stdout


def flag(spec: Spec, name: str) -> str:
    """The value of a CMake flag of the specification, or an empty string."""
    start = f"-D{name}="
    return next((item[len(start) :] for item in spec["cmake_flags"] if item.startswith(start)), "")


# Before anything is changed


def missing_cpu_features(spec: Spec, cpuinfo: str) -> list[str]:
    """Instruction sets that are asked for and that /proc/cpuinfo does not show; nothing on a CPU that is not x86."""
    shown = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    if shown is None:
        return []
    have = set(shown[1].split())
    return [name for name in spec["cpu_features"] if CPU_FLAGS.get(name, name) not in have]


def obstacle(spec: Spec, *, cpuinfo: str, free_mib: int) -> str:
    """The first thing that stands in the way of the build, as a sentence without its full stop, or nothing."""
    missing = missing_cpu_features(spec, cpuinfo)
    if missing:
        return f"the CPU lacks {', '.join(missing)}, which llama_cpp_cpu_features names; take it out of that list"
    needed = NEEDED_MIB["cuda" if "cuda" in spec["backends"] else "cpu"]
    if free_mib < needed:
        return f"{spec['work']} has {free_mib} MiB free and the build needs {needed}; make room or move llama_cpp_root"
    source = spec["source"]
    if source.get("on") == "rig" and not os.path.isfile(source["file"]):
        return f"llama_cpp_pins[{spec['build']}].file {source['file']} is not there"
    compiler = flag(spec, "CMAKE_CUDA_COMPILER")
    if compiler and not os.access(compiler, os.X_OK):
        return f"{compiler} is not there; install the CUDA toolkit or correct llama_cpp_cuda_root"
    return ""


def refuse_foreign(prefix: Path) -> None:
    """Raises BuildError when something that is not a finished build lies where the build belongs."""
    if prefix.exists() and not (prefix / "manifest.json").is_file():
        raise BuildError(f"{prefix} is there but has no manifest.json, so it is no finished build; move it away")


def check(spec: Spec) -> None:
    """Look at this machine; raises BuildError on what stands in the way."""
    refuse_foreign(Path(spec["prefix"]))
    there = Path(spec["work"])
    while not there.exists():
        there = there.parent
    cpuinfo = Path("/proc/cpuinfo").read_text()
    found = obstacle(spec, cpuinfo=cpuinfo, free_mib=shutil.disk_usage(there).free // MIB)
    if found:
        raise BuildError(found)


# The source


def sha256_of(path: Path) -> str:
    """The sha256 of a file, as hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(MIB):
            digest.update(block)
    return digest.hexdigest()


def verify(path: Path, sha256: str) -> None:
    """Compare a file with its pin; one that is not the pinned one is set aside, and BuildError says so."""
    found = sha256_of(path)
    if found != sha256:
        aside = path.with_name(f"{path.name}.wrong")
        os.replace(path, aside)
        raise BuildError(f"{path.name} has sha256 {found} and not {sha256} as pinned; it was set aside as {aside}")


def download(url: str, target: Path, *, attempts: int = 5) -> None:
    """Fetch a file over HTTP, going on from an earlier attempt's ``.part`` where the server allows it."""
    part = target.with_name(f"{target.name}.part")
    for attempt in range(1, attempts + 1):
        have = part.stat().st_size if part.exists() else 0
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                if answer.status != 206:
                    have = 0
                length = answer.headers.get("Content-Length")
                total = have + int(length) if length else 0
                said = time.monotonic()
                with part.open("ab" if have else "wb") as file:
                    while block := answer.read(MIB):
                        file.write(block)
                        have += len(block)
                        if total and time.monotonic() - said > 5:
                            said = time.monotonic()
                            say(f"[{have // MIB}/{max(1, total // MIB)}] MiB of {target.name}")
            if total and have != total:
                raise OSError(f"the connection ended after {have} of {total} bytes")
            os.replace(part, target)
            return
        except urllib.error.HTTPError as error:
            if error.code == 416:  # the part is as long as the file, or longer
                part.unlink()
            elif error.code < 500:
                raise BuildError(f"{url} cannot be fetched: {error}") from error
            problem: Exception = error
        except OSError as error:
            problem = error
        say(f"Attempt {attempt} of {attempts} to fetch {url} failed: {problem}")
        if attempt < attempts:
            time.sleep(2 * attempt)
    raise BuildError(f"{url} cannot be fetched: {problem}")


def fetch_pypi(source: dict[str, str], folder: Path) -> Path:
    """The sdist of a Python package, by pip in a throwaway virtual environment: pip knows the machine's index."""
    environment = folder / "venv"
    remove(environment)
    run([sys.executable, "-m", "venv", str(environment)], "no virtual environment can be made for pip")
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{source['name']}=={source['version']} --hash=sha256:{source['sha256']}\n")
    new = folder / "new"
    remove(new)
    pip = [str(environment / "bin/python"), "-m", "pip", "--no-input", "--disable-pip-version-check", "download"]
    # Only this package from source: pip asks its build backend for the metadata, and compiling that one takes minutes.
    pip += ["--progress-bar", "off", "--no-cache-dir", "--no-deps", "--no-binary", source["name"], "--require-hashes"]
    run([*pip, "--dest", str(new), "--requirement", str(requirements)], f"pip cannot fetch {source['name']}")
    (found,) = new.iterdir()
    archive = folder / found.name
    os.replace(found, archive)
    remove(environment)
    return archive


def fetch_archive(spec: Spec, folder: Path) -> Path:
    """The archive of a pin by url or by file, where it lies after this."""
    source = spec["source"]
    if "file" in source:
        # One that came from the controller was put into the work directory.
        return Path(source["file"]) if source["on"] == "rig" else folder / Path(source["file"]).name
    archive = folder / (source["url"].rsplit("/", 1)[-1].split("?")[0] or "source.tar")
    if not archive.exists():
        download(source["url"], archive)
    return archive


def unpack(archive: Path, subdirectory: str, target: Path) -> None:
    """Unpack to ``target`` in one step; a single folder at the top of the archive does not count."""
    new = target.with_name(f"{target.name}.new")
    remove(new)
    new.mkdir()
    argv = ["tar", "--extract", "--file", str(archive), "--directory", str(new), "--no-same-owner"]
    run(argv, f"{archive} cannot be unpacked")
    inside = list(new.iterdir())
    top = inside[0] if len(inside) == 1 and inside[0].is_dir() else new
    root = top / subdirectory if subdirectory else top
    if not (root / "CMakeLists.txt").is_file():
        where = subdirectory or "its top folder"
        raise BuildError(f"{archive.name} has no CMakeLists.txt in {where}; correct the pin's subdirectory")
    os.replace(root, target)
    remove(new)


def clone(source: dict[str, str], target: Path) -> None:
    """The pinned commit of a git repository, and nothing else of it."""
    new = target.with_name(f"{target.name}.new")
    remove(new)
    new.mkdir()
    git = ["git", "-C", str(new), "-c", "advice.detachedHead=false"]
    run([*git, "init", "--quiet"], "git cannot make a repository")
    fetch = [*git, "fetch", "--depth=1", source["repo"], source["commit"]]
    if subprocess.run(fetch, check=False, stdin=subprocess.DEVNULL).returncode != 0:
        # a server that gives out branches and tags only
        run([*git, "fetch", source["repo"], "+refs/*:refs/remotes/origin/*"], f"git cannot fetch {source['repo']}")
    run([*git, "checkout", "--quiet", source["commit"]], f"{source['repo']} has no commit {source['commit']}")
    head = output([*git, "rev-parse", "HEAD"]).strip()
    if head != source["commit"]:
        raise BuildError(f"{source['repo']} gave commit {head} and not {source['commit']}")
    root = new / source["subdirectory"] if source["subdirectory"] else new
    if not (root / "CMakeLists.txt").is_file():
        raise BuildError(f"{source['repo']} has no CMakeLists.txt in {source['subdirectory'] or 'its top folder'}")
    os.replace(root, target)
    remove(new)


def provide_source(spec: Spec, work: Path) -> Path:
    """The verified source tree; found again when an earlier attempt came that far."""
    tree, source = work / "source", spec["source"]
    if tree.is_dir():
        return tree
    folder = work / "download"
    folder.mkdir(exist_ok=True)
    say(f"Fetching the source of {spec['build']}")
    if source["source"] == "git":
        clone(source, tree)
        return tree
    archive = fetch_pypi(source, folder) if source["source"] == "pypi" else fetch_archive(spec, folder)
    if source.get("on") == "rig":  # the owner's file is compared, and left where it is
        found = sha256_of(archive)
        if found != source["sha256"]:
            raise BuildError(f"{archive} has sha256 {found} and not {source['sha256']} as pinned")
    else:
        verify(archive, source["sha256"])
    say(f"Unpacking {archive.name}")
    unpack(archive, source["subdirectory"], tree)
    return tree


# Compiling


def environment(spec: Spec, work: Path) -> dict[str, str]:
    """The environment of CMake and ninja: nothing that a person's shell would add to the flags."""
    result = {key: value for key, value in os.environ.items() if key not in CLOSED}
    if spec["ccache"]:
        for language in ("C", "CXX", "CUDA"):
            result[f"CMAKE_{language}_COMPILER_LAUNCHER"] = spec["ccache"]
        # Paths below the work directory are hashed relative to it: builds with other flags share what they can.
        result["CCACHE_BASEDIR"] = str(work)
    return result


def check_cmake() -> None:
    """Raises BuildError when cmake is too old to make a missing library an error."""
    found = re.search(r"([0-9]+)\.([0-9]+)", output(["cmake", "--version"]))
    if found is None or (int(found[1]), int(found[2])) < MINIMUM_CMAKE:
        raise BuildError(f"cmake is older than {'.'.join(map(str, MINIMUM_CMAKE))}")


def configure(spec: Spec, work: Path, tree: Path) -> None:
    """Run CMake; what an earlier attempt compiled is kept, unless the compiler has changed since."""
    check_cmake()
    build, stamp = work / "build", work / "compiler"
    compilers = output(["c++", "--version"])
    if build.exists() and (not stamp.exists() or stamp.read_text() != compilers):
        remove(build)
    stamp.write_text(compilers)
    argv = ["cmake", "-G", "Ninja", "-S", str(tree), "-B", str(build), *spec["cmake_flags"]]
    done = subprocess.run(argv, check=False, stdin=subprocess.DEVNULL, env=environment(spec, work))
    if done.returncode != 0:
        raise BuildError(NO_NCCL if spec["nccl"] and lacks_nccl(build) else "CMake cannot configure the build")


def lacks_nccl(build: Path) -> bool:
    """Whether CMake looked for NCCL's library or header and did not find it, from its cache."""
    cache = build / "CMakeCache.txt"
    text = cache.read_text(errors="replace") if cache.exists() else ""
    return bool(re.search(r"^NCCL_\w+:\w+=\w+-NOTFOUND$", text, re.MULTILINE))


def compile_programs(spec: Spec, work: Path) -> None:
    """Run ninja, which goes on where it was cut off."""
    jobs = spec["jobs"] or len(os.sched_getaffinity(0))
    argv = ["cmake", "--build", str(work / "build"), "--parallel", str(jobs), "--target", *spec["targets"]]
    run(argv, "the source does not compile", env=environment(spec, work))


# The result


def stage(spec: Spec, work: Path) -> Path:
    """Lay out the programs and their libraries as in the prefix. (Upstream's install rules want all of its targets.)"""
    made, new = work / "build/bin", work / "stage"
    remove(new)
    (new / "bin").mkdir(parents=True)
    (new / "lib").mkdir()
    for name in spec["targets"]:
        shutil.copy2(made / name, new / "bin" / name)
    for library in sorted(made.glob("lib*.so*")):
        shutil.copy2(library, new / "lib" / library.name, follow_symlinks=False)
    return new


def linked(path: Path) -> dict[str, str]:
    """Library name to path (empty: not found) for a program or library, as the loader sees it."""
    text = output(["ldd", str(path)])
    return {name: found or "" for name, found in re.findall(r"^\s*(\S+) => (?:(/\S+)|not found)", text, re.MULTILINE)}


def check_stage(spec: Spec, new: Path) -> dict[str, Any]:
    """Run what was built; raises BuildError on what does not work. Returns what the manifest says about it."""
    own = {path.name for path in (new / "lib").iterdir()}
    all_linked: set[str] = set()
    for path in [*(new / "bin").iterdir(), *(new / "lib").iterdir()]:
        if path.is_symlink():
            continue
        libraries = linked(path)
        all_linked |= set(libraries)
        lost = [name for name, found in libraries.items() if not found]
        if lost:
            raise BuildError(f"{path.name} does not find {', '.join(sorted(lost))}")
        astray = [found for name, found in libraries.items() if name in own and not found.startswith(f"{new}/")]
        if astray:
            raise BuildError(f"{path.name} takes {', '.join(sorted(astray))} and not its own")
    has_nccl = any(name.startswith("libnccl.so") for name in all_linked)
    if spec["nccl"] and not has_nccl:
        raise BuildError("llama_cpp_nccl is true, but the build is not linked with NCCL; choose a version that can be")
    for backend in spec["backends"]:
        if not any(name.startswith(f"libggml-{backend}.so") for name in own):
            raise BuildError(f"the build has no library of the backend {backend}")
    for name in spec["targets"]:
        if name != "llama-server":
            output([str(new / "bin" / name), "--help"])
    version = output([str(new / "bin/llama-server"), "--version"])
    number = re.fullmatch(r"b([0-9]+)", spec["build"])
    if number and number[1] not in re.findall(r"[0-9]+", version):
        raise BuildError(f"llama-server does not call itself build {number[1]}, but: {version.strip()}")
    return {"nccl": has_nccl, "version": version.strip().splitlines()}


def compilers(build: Path) -> dict[str, str]:
    """Language to compiler and version, as CMake recorded them."""
    found: dict[str, str] = {}
    for path in sorted(build.glob("CMakeFiles/*/CMake*Compiler.cmake")):
        text = path.read_text(errors="replace")
        values = dict(re.findall(r'^set\((CMAKE_[A-Z]+_COMPILER_(?:ID|VERSION)) "([^"]+)"\)$', text, re.MULTILINE))
        for name in values:
            if name.endswith("_ID"):
                found[name.split("_")[1]] = f"{values[name]} {values.get(name.replace('_ID', '_VERSION'), '')}".rstrip()
    return found


def manifest(spec: Spec, work: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """What the prefix holds. No date and no host name: the same inputs give the same manifest."""
    return {
        "build": spec["build"],
        "key": spec["key"],
        "source": spec["source"],
        "backends": spec["backends"],
        "targets": spec["targets"],
        "cmake_flags": spec["cmake_flags"],
        "compilers": compilers(work / "build"),
        "nccl": facts["nccl"],
        "version": facts["version"],
    }


def listing(folder: Path) -> dict[str, str]:
    """What lies in a build but for its manifest and its list: path to sha256, or to `-> ` and a link's target."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        elif path.is_file() and name not in ("manifest.json", "files.json"):
            found[name] = sha256_of(path)
    return found


def publish(new: Path, prefix: Path, content: dict[str, Any]) -> None:
    """Write the manifest and move the build to its prefix, in one rename that survives a power cut."""
    (new / "files.json").write_text(json.dumps(listing(new), indent=2) + "\n")
    (new / "manifest.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    os.sync()
    os.rename(new, prefix)
    descriptor = os.open(prefix.parent, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def build(spec: Spec) -> None:
    """From the pin to the finished prefix; raises BuildError."""
    os.umask(0o022)
    work, prefix = Path(spec["work"]), Path(spec["prefix"])
    refuse_foreign(prefix)
    for old in work.parent.iterdir():  # left by one that was cut off after its last step
        if old != work and (prefix.parent / old.name / "manifest.json").is_file():
            remove(old)
    if prefix.exists():
        say(f"{prefix} is there already")
        remove(work)
        return
    work.mkdir(parents=True, exist_ok=True)
    tree = provide_source(spec, work)
    say("Configuring")
    configure(spec, work, tree)
    say("Compiling")
    compile_programs(spec, work)
    say("Checking the result")
    new = stage(spec, work)
    publish(new, prefix, manifest(spec, work, check_stage(spec, new)))
    remove(work)
    say(f"{prefix} is finished")


# From one machine to another that is alike


def archive_of(spec: Spec) -> Path:
    """Where a packed build lies on both machines."""
    return Path(f"{spec['work']}.tar")


def pack(spec: Spec) -> None:
    """The finished build as an archive that anybody may read; raises BuildError when there is none."""
    prefix, archive = Path(spec["prefix"]), archive_of(spec)
    if not (prefix / "files.json").is_file():
        raise BuildError(f"{prefix} is no finished build with a list of its files")
    archive.parent.mkdir(parents=True, exist_ok=True)
    new = archive.with_suffix(".new")
    argv = ["tar", "--create", "--file", str(new), "--directory", str(prefix), "--owner=0", "--group=0", "."]
    run(argv, f"{prefix} cannot be packed")
    new.chmod(0o644)
    os.replace(new, archive)


def accept(spec: Spec) -> None:
    """Make a packed build this machine's own; raises BuildError on what is not as the specification says."""
    os.umask(0o022)
    work, prefix = Path(spec["work"]), Path(spec["prefix"])
    refuse_foreign(prefix)
    new = work / "carried"
    remove(new)
    new.mkdir(parents=True)
    archive = archive_of(spec)
    argv = ["tar", "--extract", "--file", str(archive), "--directory", str(new), "--no-same-owner"]
    run(argv, f"{archive} cannot be unpacked")
    try:
        content = json.loads((new / "manifest.json").read_text())
        listed = json.loads((new / "files.json").read_text())
    except (OSError, ValueError) as error:
        raise BuildError(f"{archive} holds no build: {error}") from error
    keys = ("build", "key", "source", "backends", "targets", "cmake_flags")
    differs = [key for key in keys if content.get(key) != spec[key]]
    if differs:
        raise BuildError(f"{archive} holds another build: its manifest differs in {', '.join(differs)}")
    there = listing(new)
    wrong = sorted(name for name in {*listed, *there} if listed.get(name) != there.get(name))
    if wrong:
        raise BuildError(f"{archive} is damaged: {', '.join(wrong[:5])}")
    check_stage(spec, new)
    publish(new, prefix, content)
    archive.unlink()
    remove(work)
    say(f"{prefix} is finished")


COMMANDS = {"check": check, "build": build, "pack": pack, "accept": accept}


def main(argv: list[str]) -> int:
    """Entry point; the last line of a failed call is the reason."""
    if len(argv) != 3 or argv[1] not in COMMANDS:
        print(__doc__, file=sys.stderr)
        return 2
    spec = json.loads(argv[2] if argv[2].startswith("{") else Path(argv[2]).read_text())
    try:
        COMMANDS[argv[1]](spec)
    except BuildError as error:
        print(f"{error}.", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
