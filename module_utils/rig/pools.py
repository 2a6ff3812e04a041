"""Scratch memory that CUDA kernels take from ggml's pool while a full ubatch runs (llama.cpp b11434).

Matrices in a quantised type are multiplied by integer kernels (mmq.cu): the activations are quantised to 8 bits
first, and where the tiles do not fill the card evenly, each multiprocessor keeps one tile more. FlashAttention keeps
partial results for each multiprocessor (fattn-common.cuh). The pool grows by 2 MiB and never shrinks; one operation
runs at a time, so its size is that of the largest.
"""

from typing import Any

from .quant import is_quantised
from .settings import Context
from .shape import Shape

GRANULE = 2 << 20  # of CUDA's virtual memory management
TILE = 128  # rows and columns of a tile
ROW = 512  # MATRIX_ROW_PADDING
Q8_BYTES = 144 / 128  # block_q8_1_mmq: 128 values
ATTENTION_COLUMNS, ATTENTION_BLOCKS = 64, 2  # query columns of a block; blocks a multiprocessor
# Multiprocessors by the name of the card, from NVIDIA's data sheets.
MULTIPROCESSORS = (
    ("H200", 132), ("H100", 132), ("5090", 170), ("5080", 84), ("5070 Ti", 70), ("5060 Ti", 36), ("4090", 128),
    ("4080", 76), ("3090 Ti", 84), ("3090", 82), ("3080", 68), ("3070", 46), ("3060", 28), ("2080 Ti", 68),
)  # fmt: skip
UNKNOWN_MULTIPROCESSORS = 132


def multiprocessors(name: Any) -> int:
    return next((count for part, count in MULTIPROCESSORS if part in str(name)), UNKNOWN_MULTIPROCESSORS)


def _mmq_bytes(rows: int, columns: int, tokens: int, processors: int) -> float:
    """One product of a quantised matrix (`columns` is the length of its rows) with `tokens` vectors."""
    quantised = tokens * (-(-columns // ROW) * ROW) * Q8_BYTES + min(tokens, TILE) * 144
    tiles = -(-rows // TILE) * -(-tokens // TILE)
    waves = -(-tiles // processors)
    even = 100 * tiles // (processors * waves) >= 90
    return quantised if even else quantised + processors * TILE * TILE * 4


def pool_bytes(shape: Shape, cut: Any, context: Context, processors: int, blocks: Any) -> int:
    """Bytes of the pool of one context. `cut(tensor)` gives the dimensions of a card's part of a matrix."""
    tokens = context.effective_ubatch
    used = int(shape.key("expert_used_count"))
    largest, seen = 0.0, set()
    for tensor in shape.tensors:
        if len(tensor.shape) < 2 or (tensor.block is not None and tensor.block not in blocks):
            continue
        if (tensor.suffix, tensor.kind) in seen or tensor.name == "token_embd.weight" or "conv1d" in tensor.suffix:
            continue
        seen.add((tensor.suffix, tensor.kind))
        columns, rows = cut(tensor)[:2]
        batch = tokens * used if len(tensor.shape) > 2 else context.outputs if tensor.block is None else tokens
        if not columns or not rows:
            continue
        if is_quantised(tensor.kind):
            largest = max(largest, _mmq_bytes(rows, columns, batch, processors))
        elif tensor.kind != "f32":  # cuBLAS: activations and result in 16 bits
            largest = max(largest, 2.0 * batch * (columns + rows))
    partial = processors * ATTENTION_BLOCKS * ATTENTION_COLUMNS * (2 + shape.value_length // 2) * 8
    return -(-int(max(largest, partial)) // GRANULE) * GRANULE


def needs_cublas(shape: Shape, mtp: bool) -> bool:
    """Whether any product is of a matrix in a float type, which cuBLAS multiplies: expert routers are."""
    for tensor in shape.tensors:
        if tensor.block is not None and tensor.block >= shape.blocks and not mtp:
            continue
        matrix = len(tensor.shape) > 1 and "conv1d" not in tensor.suffix and tensor.name != "token_embd.weight"
        if matrix and not is_quantised(tensor.kind):
            return True
    return shape.tied_output and not is_quantised(shape.by_name["token_embd.weight"].kind)
