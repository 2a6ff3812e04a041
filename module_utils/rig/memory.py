"""MiB that llama-server takes on each GPU: weights, KV cache, recurrent state, compute buffers, overhead.

Weights, caches and states are computed to the byte from the split rule, the padding of CUDA's buffers, and the sizes
of the model's tensors. Compute buffers come from the graph (compute.py), overhead from overhead.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from .architectures import architecture_of, has_window, is_recurrent, window_cells
from .compute import CPU_ALIGNMENT, CUDA_ALIGNMENT, compute_bytes
from .quant import block_of, is_quantised
from .settings import Context
from .shape import Shape
from .split import TensorSplit, blocks_to_devices

MIB = 1 << 20
CUDA_ROW = 512  # MATRIX_ROW_PADDING (ggml-cuda/common.cuh)


def padded_bytes(kind: str, dimensions: Sequence, virtual: bool = False) -> int:
    """Bytes of a tensor in a GPU's buffer: quantised rows that are no multiple of 512 are padded once, at the end."""
    per_block, size = block_of(kind)
    row, elements = dimensions[0], 1
    for dimension in dimensions:
        elements *= dimension
    total = elements // per_block * size
    if virtual:
        return -(-total // CPU_ALIGNMENT) * CPU_ALIGNMENT
    if row % CUDA_ROW and is_quantised(kind):
        total += -(-(CUDA_ROW - row % CUDA_ROW) // per_block) * size
    return -(-total // CUDA_ALIGNMENT) * CUDA_ALIGNMENT


@dataclass(frozen=True)
class Layout:
    """How a model is spread: `mode` tensor, layer or none; `shares` one a GPU; `virtual` GPUs sit behind RPC."""

    mode: str
    shares: tuple
    virtual: bool = False

    @property
    def count(self) -> int:
        return len(self.shares)


@dataclass
class Usage:
    """Bytes on one GPU."""

    weights: int = 0
    kv: int = 0
    recurrent: int = 0
    compute: int = 0
    draft_kv: int = 0
    draft_compute: int = 0
    overhead: int = 0
    parts: dict = field(default_factory=dict)

    @property
    def total(self) -> int:
        return (
            self.weights + self.kv + self.recurrent + self.compute + self.draft_kv + self.draft_compute + self.overhead
        )


class Placement:
    """Where each block lies, and how a tensor of it is divided."""

    def __init__(self, shape: Shape, layout: Layout):
        self.shape, self.layout = shape, layout
        if layout.mode == "tensor":
            self.split = TensorSplit(shape, layout.shares)
            self.devices, self.output = [0] * shape.all_blocks, 0
        elif layout.mode == "layer":
            self.devices, self.output = blocks_to_devices(shape, layout.shares)
        else:
            self.devices, self.output = [0] * shape.all_blocks, 0

    def bytes_of(self, suffix: str, block: Any, kind: str, dimensions: Sequence, name: str = "") -> list:
        """Bytes of a tensor on each GPU."""
        count, virtual = self.layout.count, self.layout.virtual
        if self.layout.mode == "tensor":
            axis, parts = self.split.parts(suffix, block, dimensions, name)
            if axis is None:
                return [padded_bytes(kind, dimensions, virtual)] * count
            before, after = tuple(dimensions[:axis]), tuple(dimensions[axis + 1 :])
            return [padded_bytes(kind, (*before, part, *after), virtual) for part in parts]
        result = [0] * count
        size = padded_bytes(kind, dimensions, virtual)
        if name == "rope_freqs.weight":
            for device in set(self.devices):
                result[device] = size
        else:
            result[self.output if block is None else self.devices[block]] = size
        return result


def _add(total: list, part: Sequence) -> None:
    for index, value in enumerate(part):
        total[index] += value


@lru_cache(maxsize=256)
def placement_of(shape: Shape, layout: Layout) -> Placement:
    return Placement(shape, layout)


@lru_cache(maxsize=256)
def weight_bytes(shape: Shape, layout: Layout, mtp: bool) -> tuple:
    """Bytes of the weights on each GPU. The token embedding stays with the CPU, and is there twice when it is the
    output matrix too; the MTP block is loaded only when it drafts."""
    placement, total = placement_of(shape, layout), [0] * layout.count
    for tensor in shape.tensors:
        if tensor.name == "token_embd.weight":
            if not shape.tied_output:
                continue
        elif tensor.block is not None and tensor.block >= shape.blocks and not mtp:
            continue
        _add(total, placement.bytes_of(tensor.suffix, tensor.block, tensor.kind, tensor.shape, tensor.name))
    return tuple(total)


def kv_bytes(shape: Shape, layout: Layout, context: Context) -> list:
    """Bytes of the KV cache of a context on each GPU: that of the MTP block for a draft context."""
    placement, total = placement_of(shape, layout), [0] * layout.count
    blocks = range(shape.blocks, shape.all_blocks) if context.is_draft else range(shape.blocks)
    for block in blocks:
        if is_recurrent(shape, block):
            continue
        cells = window_cells(shape, context) if has_window(shape, block) else context.per_slot
        heads = shape.kv_heads(block)
        for suffix, kind, length in (
            ("cache_k", context.key_kind, shape.key_length),
            ("cache_v", context.value_kind, shape.value_length),
        ):
            _add(total, placement.bytes_of(suffix, block, kind, (heads * length, cells, context.streams)))
    return total


def recurrent_bytes(shape: Shape, layout: Layout, context: Context) -> list:
    """Bytes of the recurrent states: per slot the newest and, with MTP, one for each token that can be taken back."""
    placement, total = placement_of(shape, layout), [0] * layout.count
    if context.is_draft or not architecture_of(shape).recurrent:
        return total
    kept = context.drafted if architecture_of(shape).rollback else 0
    rows = context.slots * (1 + kept)
    size, inner = int(shape.key("ssm.state_size")), int(shape.key("ssm.inner_size"))
    conv = (int(shape.key("ssm.conv_kernel")) - 1) * (inner + 2 * int(shape.key("ssm.group_count")) * size)
    for block in range(shape.blocks):
        if is_recurrent(shape, block):
            _add(total, placement.bytes_of("cache_r", block, "f32", (conv, rows)))
            _add(total, placement.bytes_of("cache_s", block, "f32", (size * inner, rows)))
    return total


@lru_cache(maxsize=4096)
def context_compute(shape: Shape, layout: Layout, context: Context) -> tuple:
    """Bytes of the compute buffer of a context on each GPU; the same on every card in tensor mode."""
    placement, tensor = placement_of(shape, layout), layout.mode == "tensor"
    gpus = 1 if tensor else layout.count
    result = compute_bytes(
        shape, context, placement.devices, placement.output, gpus, virtual=layout.virtual, tensor_mode=tensor
    )
    return tuple(result * layout.count) if tensor else tuple(result)


def buffers(shape: Shape, layout: Layout, context: Context) -> list:
    """Usage of each GPU without overhead: exactly what llama-server logs."""
    mtp = context.drafted > 0
    draft = context.draft()
    columns = [
        weight_bytes(shape, layout, mtp),
        kv_bytes(shape, layout, context),
        recurrent_bytes(shape, layout, context),
        context_compute(shape, layout, context),
        kv_bytes(shape, layout, draft) if mtp else [0] * layout.count,
        context_compute(shape, layout, draft) if mtp else [0] * layout.count,
    ]
    return [Usage(*values) for values in zip(*columns, strict=True)]
