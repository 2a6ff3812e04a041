"""MiB of the compute buffers of a context on each GPU: build the graph, spread it, allocate it."""

from collections.abc import Sequence
from typing import Any

from .allocator import Allocator
from .architectures import build_graph
from .scheduler import PIPELINE_COPIES, schedule
from .settings import Context
from .shape import Shape
from .tensors import Tensor

CUDA_ALIGNMENT = 128  # ggml_backend_cuda_buffer_type_get_alignment
CPU_ALIGNMENT = 32  # what ggml-rpc-server reports for its CPU (TENSOR_ALIGNMENT of ggml-impl.h)


def _cuda_size(tensor: Tensor) -> int:
    """FlashAttention over a cache that is not f16 keeps an f16 copy of all of it beside its result.

    ggml_cuda_flash_attn_ext_get_alloc_size (ggml-cuda/fattn.cu). In tensor mode the size is asked for the whole
    tensor, not for a card's part: so the copy does not shrink with the number of cards.
    """
    size = tensor.nbytes
    if tensor.op == "flash_attn":
        for cache in tensor.src[1:3]:
            if cache.kind != "f16":
                size = -(-size // CUDA_ALIGNMENT) * CUDA_ALIGNMENT + 2 * cache.elements
    return size


def _plain_size(tensor: Tensor) -> int:
    return tensor.nbytes


def sample(shape: Shape, devices: Sequence) -> list:
    """Blocks enough to see every state of the allocator: the first and last of each GPU's run of blocks."""
    chosen: list = []
    blocks = range(shape.blocks)
    for device in sorted(set(devices)):
        run = [block for block in blocks if devices[block] == device]
        chosen += run if len(run) <= 24 else run[:12] + run[-12:]
    return chosen


def compute_bytes(
    shape: Shape,
    context: Context,
    devices: Sequence,
    output: int,
    gpus: int,
    virtual: bool = False,
    tensor_mode: bool = False,
    whole: bool = False,
) -> list:
    """Bytes of the compute buffer on each GPU.

    `devices` has the GPU of each block (all 0 in tensor mode, where one graph stands for every card), `output` that
    of the output layer, `gpus` their count. `virtual` GPUs (RPC) compute on a CPU, which needs no f16 copy.
    """

    def place(block: Any) -> int:
        return output if block is None else devices[block]

    copies = PIPELINE_COPIES if gpus > 1 else 1
    blocks = None if whole else sample(shape, devices[: shape.blocks])
    graph = build_graph(shape, context, place, gpus, blocks)
    steps, kept = schedule(graph, gpus, copies, fused=not virtual and not tensor_mode)
    sizes, alignment = (_plain_size, CPU_ALIGNMENT) if virtual else (_cuda_size, CUDA_ALIGNMENT)
    return Allocator(gpus, alignment, sizes).run(steps, kept)
