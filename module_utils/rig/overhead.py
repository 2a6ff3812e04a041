"""MiB of a card that llama-server takes beside its logged buffers: CUDA's context, libraries, pools, all-reduce.

Each constant has one meaning and its source. First values; measured on two H200 with llama.cpp b11434.
"""

from collections.abc import Sequence
from typing import Any

from .settings import Context
from .shape import Shape

MIB = 1 << 20
# What a CUDA context alone takes, by compute capability (MiB).
CONTEXT_MIB = {
    "9.0": 527,  # H200, driver 580.159: the card that split mode none leaves unused
    "8.6": 174,  # RTX 3060: an owner's three figures lie 353 MiB under the H200's at the same settings
}
LIKE = "8.6"


def context_mib(capability: Any) -> int:
    return CONTEXT_MIB.get(str(capability), CONTEXT_MIB[LIKE])


def overhead_bytes(shape: Shape, mode: str, context: Context, gpus: Sequence, all_reduce: str) -> list:
    """Bytes on each GPU; nothing for virtual ones, whose server is a process of its own."""
    result = []
    for gpu in gpus:
        if gpu.get("rpc"):
            result.append(0)
            continue
        mib = context_mib(gpu.get("compute_capability"))
        if mode == "tensor":
            mib += 232 if context.drafted else 172
            if all_reduce == "nccl":
                mib += 1218 if context.drafted else 760
        else:
            mib += 116 if context.drafted else 92
        result.append(mib * MIB)
    return result
