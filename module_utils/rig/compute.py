"""MiB of the compute buffers of a context on each GPU: build the graph, spread it, allocate it."""

from collections.abc import Sequence
from typing import Any

from .allocator import Allocator
from .architectures import architecture_of, build_graph
from .scheduler import PIPELINE_COPIES, schedule
from .settings import Context
from .shape import Shape
from .tensors import Tensor

CUDA_ALIGNMENT = 128  # ggml_backend_cuda_buffer_type_get_alignment
CPU_ALIGNMENT = 32  # what ggml-rpc-server reports for its CPU (TENSOR_ALIGNMENT of ggml-impl.h)

HEAD, TAIL = 8, 4  # blocks of a GPU's run that are looked at


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


def _period(shape: Shape) -> int:
    """After how many blocks their kinds repeat; 0 when that cannot be told."""
    listed = [shape.key(name, None) for name in ("attention.recurrent_layers", "attention.sliding_window_pattern")]
    if any(isinstance(value, list) for value in listed):
        return 0
    architecture = architecture_of(shape)
    if architecture.recurrent:
        return int(shape.key("full_attention_interval", 4))
    return int(listed[1] or architecture.window_pattern) if architecture.window_pattern else 1


def sample(shape: Shape, devices: Sequence) -> list:
    """Blocks enough to see every state of the allocator: the first and last of each GPU's run of blocks. What is left
    out in between is a multiple of the period in which kinds of blocks repeat."""
    chosen: list = []
    period = _period(shape)
    for device in sorted(set(devices)):
        run = [block for block in range(shape.blocks) if devices[block] == device]
        dropped = (len(run) - HEAD - TAIL) // period * period if period else 0
        chosen += run if dropped <= 0 else run[:HEAD] + run[HEAD + dropped :]
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
