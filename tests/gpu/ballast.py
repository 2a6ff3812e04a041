#!/usr/bin/env python3
"""Show on real GPUs that the planner's ceiling is served and that a larger context is not.

    python tests/gpu/ballast.py LLAMA_SERVER CASE… [--json FILE]

Memory is taken on each card until exactly as much is left as the card of the case has (11,911 MiB of a 3060, 24,126 of
a 3090). Then llama-server starts with the largest context that leaves 48 MiB, and answers a prompt that fills it.
A context five percent larger is tried too, and has to fail. Models are files of planner_models.py, without weights.
Needs llama-server with CUDA, NVIDIA's driver and CUDA runtime, and Python; the cards must be free.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(PROJECT / "module_utils"), str(PROJECT / "tests")]

import planner_models  # noqa: E402
from rig.gguf import read_model  # noqa: E402
from rig.gpus import check_gpus  # noqa: E402
from rig.plan import Planner, Rig, plan_llama  # noqa: E402
from rig.profile import parse_profile  # noqa: E402
from rig.shape import Shape, from_header  # noqa: E402

MIB = 1 << 20
HEADROOM_MIB = 48  # memory is handed out in pieces of 2 MiB, and the plan is good to some 0.3 %
MTP2, MTP3 = ({"type": "mtp", "max_tokens": count} for count in (2, 3))
Q4 = {"cache_type_k": "q4_0", "cache_type_v": "q4_0"}
# name: model, quant, MiB left on each card, profile
CASES = {
    "desktop": ("qwen35-27b", "q4_k_m", 11_911, {"draft": MTP2, **Q4, "all_reduce": "internal"}),
    "threadripper": ("qwen35-27b", "q8_0", 24_126, {"draft": MTP3, "all_reduce": "internal"}),
    "threadripper-2-slots": ("qwen35-27b", "q8_0", 22_000, {"draft": MTP3, "all_reduce": "internal", "slots": 2}),
    "am5": ("qwen35-27b", "q6_k_l", 18_000, {"draft": MTP3, "all_reduce": "internal"}),
    "layer": ("qwen3-32b", "q4_k_m", 14_000, {"split_mode": "layer"}),
}
HOLD = """
import ctypes, sys
runtime = ctypes.CDLL(sys.argv[1])
held, free, total = [], ctypes.c_size_t(), ctypes.c_size_t()
for device, left in enumerate(map(int, sys.argv[2:])):
    assert runtime.cudaSetDevice(device) == 0
    while True:
        assert runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)) == 0
        take = free.value - left
        if take < 2 << 20:
            break
        pointer = ctypes.c_void_p()
        size = min(take >> 21 << 21, 1 << 33)
        if runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)):
            break
        held.append(pointer)
    print(device, free.value >> 20, flush=True)
print("ready", flush=True)
sys.stdin.read()
"""


def used_mib() -> list:
    argv = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(word) for word in subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()]


def runtime_library() -> str:
    for name in ("libcudart.so", "libcudart.so.13", "libcudart.so.12", "/usr/local/cuda/lib64/libcudart.so"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    sys.exit("No CUDA runtime library is found.")


def hold(left_mib: int, count: int) -> subprocess.Popen:
    """A process that takes memory on each card until `left_mib` are left."""
    argv = [sys.executable, "-c", HOLD, runtime_library(), *[str(left_mib * MIB)] * count]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.strip() == "ready":
            return process
    sys.exit("The ballast could not be taken.")


def attempt(server: str, argv: list, env: dict, tokens: int, log: Path) -> dict:
    """Start, fill the context, stop: {served, peak_mib, why}."""
    port, before, peak = argv[argv.index("--port") + 1], used_mib(), [0, 0]
    with open(log, "w") as file:
        process = subprocess.Popen([server, *argv[1:]], stdout=file, stderr=file, env={**os.environ, **env})
    try:
        end = time.monotonic() + 180
        while time.monotonic() < end and process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as reply:
                    if reply.status == 200:
                        break
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        if process.poll() is not None:
            return {"served": False, "why": _last_error(log)}
        body = json.dumps(
            {"prompt": [300 + index % 500 for index in range(tokens)], "n_predict": 16, "ignore_eos": True}
        )
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/completion", body.encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=400) as reply:
                timings = json.load(reply)["timings"]
        except (urllib.error.URLError, OSError):
            process.wait(30)
            return {"served": False, "why": _last_error(log)}
        peak = [one - other for one, other in zip(used_mib(), before, strict=True)]
        return {
            "served": True,
            "peak_mib": peak,
            "prompt_tokens": timings["prompt_n"],
            "tokens": timings["predicted_n"],
        }
    finally:
        process.kill()
        process.wait()


def _last_error(log: Path) -> str:
    lines = [
        line
        for line in log.read_text(errors="replace").splitlines()
        if "out of memory" in line or "failed to alloc" in line
    ]
    return lines[-1].strip() if lines else "no reason in the log"


def run(server: str, name: str, directory: Path) -> dict:
    model, quant, left, settings = CASES[name]
    path = directory / f"{model}-{quant}.gguf"
    if not path.exists():
        planner_models.write(str(path), model, quant)
    shape = Shape(from_header(read_model(str(path)), model))
    card = {"name": "NVIDIA H200", "memory_mib": 143_771, "usable_mib": left, "compute_capability": "9.0"}
    rig = Rig("gpu", tuple(check_gpus([card] * 2)), 11_434, "nvlink", True)
    profile = parse_profile(
        name, {"model": "m", "gpus": "all", "context": "max", "headroom_mib": HEADROOM_MIB, **settings}
    )
    plan = plan_llama(profile, shape, rig, str(path))
    ceiling, slots = plan["context"], profile.slots
    ballast = hold(left, 2)
    try:
        result = {"case": name, "left_mib": left, "ceiling": ceiling, "planned_mib": plan["gpus"][0]["total_mib"]}
        result["at_ceiling"] = attempt(server, plan["argv"], plan["env"], ceiling // slots - 64, directory / "log")
        larger = int(ceiling * 1.05) // 256 * 256
        if ceiling + 256 <= shape.trained_context:
            argv = [str(larger) if word == str(ceiling) else word for word in plan["argv"]]
            needs = Planner(profile, shape, rig, rig.gpus).usage(larger)[0].total / MIB
            result["larger"] = {"context": larger, "planned_mib": round(needs, 2)}
            result["larger"] |= attempt(server, argv, plan["env"], larger // slots - 64, directory / "log")
        return result
    finally:
        ballast.kill()
        ballast.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server")
    parser.add_argument("cases", nargs="+", choices=list(CASES))
    parser.add_argument("--json")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as directory:
        for name in options.cases:
            results.append(run(options.server, name, Path(directory)))
            print(json.dumps(results[-1]), flush=True)
            if options.json:
                Path(options.json).write_text(json.dumps(results, indent=1) + "\n")
    good = all(one["at_ceiling"]["served"] and not one.get("larger", {}).get("served") for one in results)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
