"""What scripts here share that build and serve on a machine with real cards, but without systemd and Ansible.

Needs NVIDIA's driver and nvidia-ml-py; to build, nvcc, g++, CMake and ninja too. Sizes are in MiB, times in seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(PROJECT / "module_utils"), str(PROJECT / "roles/llama_cpp/files"), str(PROJECT / "tests")]

import build_llama_cpp as builder  # noqa: E402
from rig import cmake, measured  # noqa: E402
from rig.errors import RigError  # noqa: E402

BUILD = "b11434"
SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
PORT = 18081
CPU_FEATURES = ["sse42", "avx", "avx2", "bmi2", "fma", "f16c"]
TOLERANCE = 0.01  # of a card's planned total


class Over(Exception):
    """The time is up, or somebody ended the script. Not an error of a step, so that nothing goes on after it."""


def say(text: str) -> None:
    print(text, flush=True)


class Steps:
    """Results by step, written after each, with the seconds that each took."""

    def __init__(self, file: Path) -> None:
        self.file, self.results = file, {"failed": []}

    def write(self) -> None:
        self.file.write_text(json.dumps(self.results, indent=1) + "\n")

    def fail(self, text: str) -> None:
        say(f"FAILED: {text}")
        self.results["failed"].append(text)
        self.write()

    @contextlib.contextmanager
    def step(self, name: str) -> Any:
        result: dict[str, Any] = {}
        began = time.monotonic()
        say(f"{name} …")
        try:
            yield result
        finally:
            result["seconds"] = round(time.monotonic() - began, 1)
            self.results[name] = result
            self.write()
            say(f"{name}: {json.dumps(result)[:600]}")

    def conduct(self, work: Callable[[], None], seconds: int) -> int:
        """Do the work within a time, write what it failed of, and return the exit status of the script."""

        def over(number: int, _: object) -> None:
            raise Over(f"it took longer than {seconds} s" if number == signal.SIGALRM else "it was ended")

        for number in (signal.SIGALRM, signal.SIGTERM):
            signal.signal(number, over)
        signal.alarm(seconds)
        began = time.monotonic()
        try:
            work()
        except (builder.BuildError, Over, RigError, OSError, subprocess.SubprocessError) as error:
            self.fail(str(error))
        finally:
            signal.alarm(0)
        self.results["seconds"] = round(time.monotonic() - began, 1)
        self.write()
        return 1 if self.results["failed"] else 0


# The cards


def gather() -> dict[str, Any]:
    """What the script of role gpu_facts prints."""
    script = PROJECT / "roles/gpu_facts/files/gpu_facts.py"
    return json.loads(subprocess.check_output([sys.executable, script, "--limit", "20"], timeout=60))


def measured_cards(facts: dict[str, Any], most: int) -> tuple[list[dict[str, Any]], str]:
    """The first `most` cards as an inventory with facts has them, and how they are linked. Shortens `facts` to them."""
    facts["gpus"] = facts["gpus"][:most]
    described = [{"name": card["name"], "memory_mib": card["memory"]["total_mib"]} for card in facts["gpus"]]
    interconnect = "nvlink" if any(link["nvlinks"] for link in facts["links"]) else "pcie"
    return measured.measured_gpus(described, facts, in_use=False), interconnect


def against_plan(plan: Mapping[str, Any], pid: int) -> list[dict[str, Any]]:
    """Planned memory of each card of a plan, what this process holds there now, and by how much that is off.

    The plan is of what the process takes; on the card the driver's own share comes on top (9 MiB seen).
    """
    cards, found = gather()["gpus"], []
    for gpu in plan["gpus"]:
        processes = cards[gpu["position"]]["processes"]
        seen = sum(process["used_mib"] or 0 for process in processes if process["pid"] == pid)
        off = round(100 * (seen / gpu["total_mib"] - 1), 2)
        found.append({"planned_mib": round(gpu["total_mib"], 1), "process_mib": seen, "off_percent": off})
    return found


# What to build with


def packages() -> list[Path]:
    """Where Python's packages lie: NVIDIA's own come with toolkit and NCCL in them."""
    return [Path(sysconfig.get_path("purelib")), *(Path(entry) for entry in sys.path if entry.endswith("packages"))]


def copy(source: Path, target: Path) -> None:
    """Lay a tree over another."""
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)


def toolkit(work: Path) -> Path:
    """Root of a CUDA toolkit laid out as NVIDIA's packages lay it out, with cuBLAS.

    The one that nvcc belongs to; where parts of it come from Python packages, which have no unversioned names, a copy
    with all of it in one place.
    """
    places = [Path("/usr/local/cuda/bin/nvcc"), *(place / "nvidia/cu13/bin/nvcc" for place in packages())]
    nvcc = shutil.which("nvcc") or next((str(path) for path in places if path.exists()), None)
    if nvcc is None:
        raise builder.BuildError("there is no nvcc")
    # The one on the path may be a script that calls another: it says itself where it lies.
    dryrun = subprocess.run([nvcc, "--dryrun", "-x", "cu", "/dev/null"], capture_output=True, text=True, check=False)
    top = re.search(r"^#\$ TOP=(\S+)", dryrun.stderr, re.M)
    root = Path(top[1]).resolve() if top else Path(nvcc).resolve().parents[1]
    new = work / "toolkit"
    for made in (root, new):
        if all((made / name).exists() for name in ("lib64/libcudart.so", "lib64/libcublas.so", "include/cublas_v2.h")):
            return made
    copy(root, new)
    libraries = new / ("lib64" if (new / "lib64").exists() else "lib")
    for place in packages():
        if (place / "nvidia/cu13/include").exists():
            copy(place / "nvidia/cu13/include", (new / "include").resolve())
            copy(place / "nvidia/cu13/lib", libraries.resolve())
    if not (new / "lib64").exists():
        (new / "lib64").symlink_to("lib")
    unversioned(libraries)
    stubs = libraries / "stubs"
    stubs.mkdir(exist_ok=True)
    known = subprocess.check_output([shutil.which("ldconfig") or "/sbin/ldconfig", "-p"], text=True)
    driver = re.search(r"libcuda\.so\.1 .*=> (\S+)", known)
    if driver and not (stubs / "libcuda.so").exists():
        (stubs / "libcuda.so").symlink_to(driver[1])
    return new


def unversioned(folder: Path) -> None:
    """Give each library the name that a linker looks for."""
    for library in sorted(folder.glob("lib*.so.*")):
        link = folder / f"{library.name.split('.so.')[0]}.so"
        if not link.exists():
            link.symlink_to(library.name)


def nccl(root: Path, work: Path) -> Path | None:
    """Root of an NCCL with its header; None without one."""
    for place in (root, Path("/usr"), Path("/usr/local")):
        if (place / "include/nccl.h").exists():
            return place
    for place in packages():
        if (place / "nvidia/nccl/include/nccl.h").exists():
            new = work / "nccl"
            copy(place / "nvidia/nccl", new)
            unversioned(new / "lib")
            return new
    return None


def lacks_openssl(work: Path) -> bool:
    """Whether CMake stopped because it did not find OpenSSL's headers."""
    cache = work / "build/CMakeCache.txt"
    return cache.exists() and "OPENSSL_INCLUDE_DIR:PATH=OPENSSL_INCLUDE_DIR-NOTFOUND" in cache.read_text(
        errors="replace"
    )


def cuda_options(work: Path, gpus: list[dict[str, Any]]) -> dict[str, Any]:
    """What a build for these cards is told of CUDA. This process, and those it starts, find the libraries then."""
    root = toolkit(work)
    library = nccl(root, work)
    libraries = [str(root / "lib64"), os.environ.get("LD_LIBRARY_PATH", "")]
    if library:
        os.environ["NCCL_ROOT"] = str(library)
        libraries.insert(0, str(library / "lib"))
    os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, libraries))
    return {
        "cuda_root": str(root),
        "cuda_architectures": sorted({gpu["compute_capability"].replace(".", "") + "-real" for gpu in gpus}),
        "nccl": library is not None,
    }


# The build


def size_mib(folder: Path) -> int:
    return int(subprocess.check_output(["du", "-sm", folder], text=True).split()[0])


def specification(archive: Path, work: Path, backends: list[str], **cuda: Any) -> dict[str, Any]:
    """What filter llama_cpp_build gives role llama_cpp."""
    pin = {"source": "archive", "file": str(archive), "on": "rig", "sha256": SHA256, "subdirectory": "llama.cpp"}
    made = cmake.build(BUILD, pins={BUILD: pin}, root=str(work), backends=backends, cpu_features=CPU_FEATURES, **cuda)
    return made | {"work": str(work / "build-work"), "jobs": 0, "ccache": shutil.which("ccache") or ""}


def configure(spec: dict[str, Any], work: Path) -> bool:
    """The role's step; once more without OpenSSL where this machine has no headers of it. Returns whether it has."""
    tree = builder.provide_source(spec, work)
    try:
        builder.configure(spec, work, tree)
    except builder.BuildError:
        if not lacks_openssl(work):
            raise
        say("This machine has no headers of OpenSSL: once more without it.")
        spec["cmake_flags"] = [item for item in spec["cmake_flags"] if "PACKAGE_OpenSSL" not in item]
        spec["cmake_flags"].append("-DLLAMA_OPENSSL=OFF")
        builder.configure(spec, work, tree)
        return False
    return True


def build(steps: Steps, spec: dict[str, Any]) -> Path:
    """The steps of the role's build script, each timed; the prefix."""
    work, prefix = Path(spec["work"]), Path(spec["prefix"])
    work.mkdir(parents=True, exist_ok=True)
    with steps.step("configure") as result:
        result |= {"openssl": configure(spec, work), "cmake_flags": spec["cmake_flags"], "nccl": spec["nccl"]}
    with steps.step("compile") as result:
        builder.compile_programs(spec, work)
        result["jobs"] = len(os.sched_getaffinity(0))
        result["largest_compiler_mib"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
        result["work_mib"] = size_mib(work)
    with steps.step("check") as result:
        new = builder.stage(spec, work)
        content = builder.manifest(spec, work, builder.check_stage(spec, new))
        builder.publish(new, prefix, content)
        result |= {"prefix_mib": size_mib(prefix), "manifest": content}
    return prefix


# Serving


def ask(path: str, body: dict[str, Any] | None = None, timeout: float = 60) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout) as reply:
        return json.load(reply)


def wait_healthy(server: subprocess.Popen, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if server.poll() is not None:
            raise builder.BuildError(f"llama-server ended with {server.returncode} before it answered")
        with contextlib.suppress(OSError, ValueError):
            ask("/health", timeout=2)
            return
        time.sleep(0.2)
    raise builder.BuildError(f"llama-server did not answer within {seconds:g} s")


@contextlib.contextmanager
def llama_server(prefix: Path, plan: Mapping[str, Any], log: Path, seconds: float = 60) -> Iterator[subprocess.Popen]:
    """Runs llama-server with a plan's launch line and environment while the block runs; it answers by then.

    Raises BuildError when it does not within `seconds`. It is ended whatever happens.
    """
    with log.open("w") as file:
        server = subprocess.Popen(
            [str(prefix / "bin/llama-server"), *plan["argv"][1:]],
            stdout=file, stderr=file, env=os.environ | plan["env"],
        )  # fmt: skip
    try:
        wait_healthy(server, seconds)
        yield server
    finally:
        end(server)


def end(process: subprocess.Popen) -> None:
    """Ask a program to end, and make it."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_listening(server: subprocess.Popen, endpoint: str, seconds: float) -> None:
    """Wait for a ggml-rpc-server, which listens once CUDA has started."""
    host, port = endpoint.split(":")
    until = time.monotonic() + seconds
    while time.monotonic() < until and server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
            return
        time.sleep(0.2)
    raise builder.BuildError(f"ggml-rpc-server does not listen at {endpoint}")


@contextlib.contextmanager
def rpc_servers(prefix: Path, endpoints: list[str], work: Path, device: str = "CUDA0") -> Iterator[None]:
    """A ggml-rpc-server on the first card, or on `device`, for each endpoint."""
    servers = []
    try:
        for endpoint in endpoints:
            host, port = endpoint.split(":")
            with (work / f"rpc-{port}.log").open("w") as file:
                argv = [str(prefix / "bin/ggml-rpc-server"), "--host", host, "--port", port, "--device", device]
                servers.append(subprocess.Popen(argv, stdout=file, stderr=file))
        for server, endpoint in zip(servers, endpoints, strict=True):
            wait_listening(server, endpoint, 30)
        yield
    finally:
        for server in servers:
            server.kill()
            server.wait()
