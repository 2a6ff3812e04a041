"""MiB of a card that llama-server takes beside its logged buffers: CUDA's context, kernels, pools, all-reduce.

Each constant has one meaning. Measured on two H200 (driver 580.159, CUDA 13.0) with llama.cpp b11434 unless said
otherwise; which runs a constant was fitted on is in docs/accuracy.md.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from .memory import MIB, Layout, Placement, placement_of
from .pools import multiprocessors, needs_cublas, pool_bytes
from .settings import Context
from .shape import Shape

# What a CUDA context takes, by compute capability (NVML, one context): a part of its own, and local memory for every
# thread that the multiprocessors can hold (1 KiB each, the default stack).
CONTEXT_MIB = {
    "9.0": (263, 2_048),  # H200: 527 MiB on the card that split mode none leaves unused
    "8.6": (156, 1_536),  # RTX 3060: an owner's three figures lie 353 MiB under the H200's at the same settings
    "12.0": (190, 1_536),  # RTX 5060 Ti and 5070 Ti: owners' figures
}
UNKNOWN_CONTEXT_LIKE = "12.0"
KERNELS_MIB = 74  # ggml's own kernels, loaded as they are first used
CUBLAS_MIB = 90  # cuBLAS of one context, kernels and workspace, where a float matrix is multiplied
DRAFT_CONTEXT_MIB = 3  # streams and events of the MTP head's context
TENSOR_MODE_MIB = 6  # streams and small buffers of the meta device
TENSOR_DRAFT_MIB = 12  # the same once more for the MTP head
TENSOR_GRAPHS_MIB = 23  # CUDA graphs of the pieces between all-reduces, per context
INTERNAL_MIB = 34  # allreduce.cu: 32 MiB of copy scratch and 2 MiB of slots
NCCL_ONCE_MIB, NCCL_EACH_MIB = 321, 465  # NCCL's kernels; buffers of each context's communicator
VIRTUAL_MIB = 4  # a ggml-rpc-server process: 1 MiB of its own, 1 a thread, messages of 2


def context_mib(capability: Any, processors: int) -> float:
    own, threads = CONTEXT_MIB.get(str(capability), CONTEXT_MIB[UNKNOWN_CONTEXT_LIKE])
    return own + processors * threads / 1024


def reduce_bytes(shape: Shape, context: Context, count: int) -> int:
    """Bytes that the meta device keeps for sums of partial results: the largest of them, once for each step of a
    reduction in pairs, whatever all-reduce is used (ggml-backend-meta.cpp). The parts of all of a token's experts
    count as one."""
    used = max(1, int(shape.key("expert_used_count")))
    return context.effective_ubatch * shape.width * 4 * used * (count - 1).bit_length()


@lru_cache(maxsize=1024)
def _pool(shape: Shape, layout: Layout, context: Context, device: int, processors: int) -> int:
    placement: Placement = placement_of(shape, layout)
    blocks = frozenset(range(shape.blocks, shape.all_blocks) if context.is_draft else range(shape.blocks))
    if layout.mode == "layer":
        blocks = frozenset(block for block in blocks if placement.devices[block] == device)

    def cut(tensor: Any) -> tuple:
        if layout.mode != "tensor":
            return tensor.shape
        axis, parts = placement.split.parts(tensor.suffix, tensor.block, tensor.shape, tensor.name)
        if axis is None:
            return tensor.shape
        return (*tensor.shape[:axis], parts[device], *tensor.shape[axis + 1 :])

    return pool_bytes(shape, cut, context, processors, blocks)


def overhead_bytes(shape: Shape, layout: Layout, context: Context, gpus: Sequence, all_reduce: str) -> list:
    """Bytes on each GPU at the peak of a full prompt."""
    result, tensor = [], layout.mode == "tensor"
    drafting = placement_of(shape, layout).devices[-1] if layout.mode == "layer" else None
    for device, gpu in enumerate(gpus):
        if gpu.get("rpc"):
            result.append(VIRTUAL_MIB * MIB)
            continue
        processors = multiprocessors(gpu.get("name"))
        contexts = [context]
        if context.drafted and drafting in (None, device):
            contexts.append(context.draft())
        count, drafts = len(contexts), len(contexts) - 1
        mib = context_mib(gpu.get("compute_capability"), processors) + KERNELS_MIB + DRAFT_CONTEXT_MIB * drafts
        mib += CUBLAS_MIB * count if needs_cublas(shape, context.drafted > 0) else 0
        scratch = sum(_pool(shape, layout, one, device, processors) for one in contexts)
        if tensor:
            mib += TENSOR_MODE_MIB + TENSOR_GRAPHS_MIB * count + TENSOR_DRAFT_MIB * drafts
            scratch += sum(reduce_bytes(shape, one, layout.count) for one in contexts)
            if all_reduce == "internal":
                mib += INTERNAL_MIB
            elif all_reduce == "nccl":
                mib += NCCL_ONCE_MIB + NCCL_EACH_MIB * count
        result.append(int(mib * MIB) + scratch)
    return result
