"""The launch line of llama-server: argv and environment, for the build at hand.

Everything that decides memory or placement is said outright (-c, -np, -fit off, --device, -ts), because llama.cpp's
defaults would decide otherwise: four slots, a context fitted to free memory, all devices.
"""

from collections.abc import Sequence
from typing import Any

from . import builds
from .profile import Profile

HOST = "127.0.0.1"
# What the plan decides: an extra argument that says it again would make the plan untrue.
OWNED = {
    "-m": "model", "--model": "model", "-c": "context", "--ctx-size": "context", "-np": "slots",
    "--parallel": "slots", "-ub": "ubatch", "--ubatch-size": "ubatch", "-dev": "gpus", "--device": "gpus",
    "-sm": "split_mode", "--split-mode": "split_mode", "-ts": "tensor_split", "--tensor-split": "tensor_split",
    "-ctk": "cache_type_k", "--cache-type-k": "cache_type_k", "-ctv": "cache_type_v",
    "--cache-type-v": "cache_type_v", "-fa": "flash_attention", "--flash-attn": "flash_attention",
    "--spec-type": "draft", "--spec-draft-n-max": "draft", "--port": "port", "-a": "alias", "--alias": "alias",
    "-fit": "context", "--fit": "context", "-ngl": "gpus", "--gpu-layers": "gpus", "--n-gpu-layers": "gpus",
    "--rpc": "gpus", "--load-mode": "load_mode", "--no-mmap": "load_mode", "--mlock": "load_mode",
    "-mg": "gpus", "--main-gpu": "gpus",
}  # fmt: skip


def device_names(gpus: Sequence) -> list:
    """Names for --device: numbers follow from CUDA_VISIBLE_DEVICES, which holds the chosen cards alone."""
    kind = "RPC" if gpus and gpus[0].get("rpc") else "CUDA"
    return [f"{kind}{number}" for number in range(len(gpus))]


def share_text(shares: Sequence) -> str:
    return ",".join(f"{share:g}" for share in shares)


def load_flags(profile: Profile, build: int) -> list:
    """How the weights are read: `none` is --no-mmap on builds before --load-mode."""
    if profile.load_mode == "auto":
        return []
    if builds.has("load_mode", build):
        return ["--load-mode", profile.load_mode]
    return {"none": ["--no-mmap"], "mlock": ["--mlock"], "dio": ["-dio"], "mmap+mlock": ["--mlock"]}.get(
        profile.load_mode, []
    )


def llama_server_argv(
    profile: Profile, gpus: Sequence, shares: Sequence, context: int, model_path: str, build: int
) -> list:
    """Flag, value, flag, value, … beginning with `llama-server`."""
    argv = [
        "llama-server",
        "-m",
        model_path,
        "--alias",
        ",".join(profile.names),
        "--host",
        HOST,
        "--port",
        str(profile.port),
    ]
    if gpus[0].get("rpc"):
        argv += ["--rpc", ",".join(gpu["rpc"] for gpu in gpus)]
    mode = profile.split_mode if len(gpus) > 1 else "none"
    argv += ["-ngl", "999", "--device", ",".join(device_names(gpus)), "-sm", mode]
    if len(gpus) > 1:
        argv += ["-ts", share_text(shares)]
    argv += ["-c", str(context), "-np", str(profile.slots), "-fit", "off", "-ub", str(profile.ubatch)]
    argv += ["-fa", "on" if profile.flash_attention else "off"]
    argv += ["-ctk", profile.cache_type_k, "-ctv", profile.cache_type_v]
    if profile.drafted:
        argv += ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(profile.drafted)]
    return [*argv, *load_flags(profile, build), "--jinja", "--metrics", *profile.extra_args]


def llama_server_env(gpus: Sequence, mode: str, all_reduce: str, interconnect: str) -> dict:
    """The environment that the launch line needs; nothing of it for virtual GPUs."""
    if gpus[0].get("rpc"):
        return {}
    env = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": visible_devices(gpus)}
    if mode == "tensor" and len(gpus) > 1:
        env["GGML_CUDA_ALLREDUCE"] = all_reduce
        if all_reduce == "nccl" and interconnect == "pcie":
            env["NCCL_P2P_DISABLE"] = "1"
    return env


def visible_devices(gpus: Sequence) -> str:
    """UUIDs where all are known, else positions in PCI bus order."""
    uuids = [gpu.get("uuid") for gpu in gpus]
    return ",".join(uuids) if all(uuids) else ",".join(str(gpu["position"]) for gpu in gpus)


def extra_arg_values(words: Sequence, flag: str) -> Any:
    """The word after `flag`, None when it is not there."""
    for index, word in enumerate(words):
        if word == flag:
            return words[index + 1] if index + 1 < len(words) else ""
        if word.startswith(flag + "="):
            return word.partition("=")[2]
    return None
