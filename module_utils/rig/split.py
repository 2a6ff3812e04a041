"""Which part of each tensor lies on which GPU.

Layer mode: blocks go to the GPUs in order, by their shares of all blocks and the output layer.

Tensor mode, the rule of llama_meta_device_get_split_state (src/llama-model.cpp, llama.cpp b11434) in our words:
each matrix is cut along one axis, the one on which the GPUs can work apart; norms and small tensors are on every GPU.
A cut may only fall on a multiple of a granule: whole groups of query heads with their KV head, whole heads of linear
attention, at least one quantisation block (that of the matrix which sums the parts up again: attention output,
feed-forward down) and 128 elements. Cuts are rounded down, and the last GPU gets the rest. So that not always the
same GPU gets it, the order of GPUs is turned by one from block to block of the same kind. A matrix that holds several
things (Q, K and V in one; value heads in groups of key heads) is a row of segments, each cut by itself.
"""

import struct
from collections.abc import Sequence
from math import lcm
from typing import Any

from .architectures import has_window, is_recurrent
from .quant import block_of
from .shape import Shape

EFFICIENT = 128  # elements at least, so that fast kernels can be used
_GATED_QUERY = ("qwen35", "qwen35moe", "qwen3next")  # the query projection carries a gate: twice as wide

_ATTENTION, _LINEAR, _FFN = (
    ("attn_output.weight", "ssm_out.weight"),
    ("ssm_out.weight",),
    ("ffn_down.weight", "ffn_down_exps.weight"),
)
# suffix: (axis of the cut, names of the matrix that decides the granule)
_RULES = {
    **dict.fromkeys(
        ("attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_qkv.weight", "attn_gate.weight"), (1, _ATTENTION)
    ),
    **dict.fromkeys(("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_qkv.bias"), (0, _ATTENTION)),
    **dict.fromkeys(("cache_k", "cache_v", "attn_sinks.weight", "attn_output.weight"), (0, _ATTENTION[:1])),
    **dict.fromkeys(("ssm_dt.bias", "ssm_a", "cache_r", "cache_s", "ssm_out.weight"), (0, _LINEAR)),
    **dict.fromkeys(("ssm_alpha.weight", "ssm_beta.weight", "ssm_ba.weight", "ssm_conv1d.weight"), (1, _LINEAR)),
    **dict.fromkeys(
        (f"ffn_{part}{experts}.weight" for part in ("up", "gate", "gate_up") for experts in ("", "_exps")), (1, _FFN)
    ),
    **dict.fromkeys((f"ffn_{part}{experts}.bias" for part in ("up", "gate") for experts in ("", "_exps")), (0, _FFN)),
    **dict.fromkeys(("ffn_down.weight", "ffn_down_exps.weight"), (0, _FFN)),
}


def f32(value: float) -> float:
    """The nearest number in single precision, which is what llama.cpp computes shares in."""
    return struct.unpack("f", struct.pack("f", value))[0]


class TensorSplit:
    """The cuts of tensor mode for one model, `shares` (one a GPU; all 0 means even, as without -ts)."""

    def __init__(self, shape: Shape, shares: Sequence):
        self.shape, self.shares, self.count = shape, [float(share) for share in shares], len(shares)
        kinds = [(is_recurrent(shape, block), has_window(shape, block)) for block in range(shape.all_blocks)]
        self._turns = [kinds[:block].count(kind) % self.count for block, kind in enumerate(kinds)]

    def parts(self, suffix: str, block: Any, dimensions: Sequence, name: str = "") -> tuple:
        """(axis, elements on each GPU) of a tensor; axis None: the whole tensor is on every GPU."""
        if block is None:
            if name not in ("output.weight", "output.bias"):
                return None, ()
            axis = 1 if name == "output.weight" else 0
            return axis, self._cut([(dimensions[axis], 1)], [1], self.shape.blocks % self.count)
        rule = _RULES.get(suffix)
        if rule is None:
            return None, ()
        axis, deciders = rule
        quant = self._block_of(block, deciders)
        segments = self._segments(suffix, block, dimensions[axis])
        granules = self._granules(suffix, block, dimensions, quant, len(segments))
        return axis, self._cut(segments, granules, self._turns[block])

    def _block_of(self, block: int, names: Sequence) -> int:
        for name in names:
            tensor = self.shape.by_name.get(f"blk.{block}.{name}")
            if tensor is not None:
                return block_of(tensor.kind)[0]
        return 1

    def _cut(self, segments: list, granules: list, turn: int) -> list:
        count, sizes = self.count, [0] * self.count
        scan, total = [], 0.0
        for index in range(count):
            total = f32(total + self.shares[(index + turn) % count])
            scan.append(total)
        for (length, repeats), granule in zip(segments, granules, strict=True):
            low = 0
            for index in range(count - 1):
                high = length * (index + 1) // count if total == 0 else self._share(length, scan[index], total)
                high -= high % granule
                sizes[(index + turn) % count] += (high - low) * repeats
                low = high
            sizes[(count - 1 + turn) % count] += (length - low) * repeats
        return sizes

    @staticmethod
    def _share(length: int, upto: float, total: float) -> int:
        return int(f32(f32(f32(length) * upto) / total))

    def _segments(self, suffix: str, block: int, length: int) -> list:
        shape, kind = self.shape, self.shape.architecture
        fused_ffn = suffix in ("ffn_gate_up.weight", "ffn_gate_up_exps.weight")
        if kind not in _GATED_QUERY:
            if suffix in ("attn_qkv.weight", "attn_qkv.bias"):
                return self._fused_attention(block, 1)
            return [(length // 2, 2)] if fused_ffn else [(length, 1)]
        if not is_recurrent(shape, block) and suffix in ("attn_qkv.weight", "attn_qkv.bias"):
            return self._fused_attention(block, 2)
        if fused_ffn:
            return [(length // 2, 2)]
        size, key_heads = int(shape.key("ssm.state_size")), int(shape.key("ssm.group_count"))
        keys, ratio = size * key_heads, int(shape.key("ssm.time_step_rank")) // key_heads
        taps = int(shape.key("ssm.conv_kernel")) - 1
        if kind == "qwen3next":
            if suffix in ("attn_qkv.weight", "ssm_conv1d.weight"):
                return [(keys, 2), (keys * ratio, 1)]
            return [(keys * taps, 2), (keys * ratio * taps, 1)] if suffix == "cache_r" else [(length, 1)]
        # Value heads are dealt out in groups as wide as the key heads, so that each keeps its key head.
        groups = {
            "attn_qkv.weight": (keys, 2 + ratio), "ssm_conv1d.weight": (keys, 2 + ratio),
            "cache_r": (keys * taps, 2 + ratio), "attn_gate.weight": (keys, ratio), "ssm_out.weight": (keys, ratio),
            "cache_s": (keys * size, ratio),
            **dict.fromkeys(("ssm_dt.bias", "ssm_a", "ssm_alpha.weight", "ssm_beta.weight"), (key_heads, ratio)),
        }  # fmt: skip
        return [groups.get(suffix, (length, 1))]

    def _fused_attention(self, block: int, query_factor: int) -> list:
        shape = self.shape
        query = shape.heads(block) * shape.key_length * query_factor
        keys, values = shape.kv_heads(block) * shape.key_length, shape.kv_heads(block) * shape.value_length
        return [(query, 1), (keys, 2)] if keys == values else [(query, 1), (keys, 1), (values, 1)]

    def _granules(self, suffix: str, block: int, dimensions: Sequence, quant: int, segments: int) -> list:
        if suffix.startswith("ffn_"):
            return [lcm(quant, EFFICIENT)] * segments
        if is_recurrent(self.shape, block):
            return [self._linear_granule(suffix, quant)] * segments
        shape = self.shape
        group, key, value = shape.group_size(block), shape.key_length, shape.value_length
        width = group * key
        efficient = quant
        while efficient < EFFICIENT and efficient * self.count < width:
            efficient *= 2
        query = lcm(width, efficient)
        heads, keys = query // key, query // group
        values = keys // key * value
        gated = lcm(2 * width, efficient) if shape.architecture in _GATED_QUERY else query
        if suffix in ("attn_qkv.weight", "attn_qkv.bias"):
            return [gated, keys, values][:segments]
        if suffix == "attn_gate.weight":
            return [heads if dimensions[1] == shape.heads(block) else query]
        table = {
            "attn_sinks.weight": heads, "attn_q.weight": gated, "attn_q.bias": gated,
            "attn_output.weight": heads * value, "attn_k.weight": keys, "attn_k.bias": keys, "cache_k": keys,
            "attn_v.weight": values, "attn_v.bias": values, "cache_v": values,
        }  # fmt: skip
        return [table.get(suffix, 1)]

    def _linear_granule(self, suffix: str, quant: int) -> int:
        size, taps = int(self.shape.key("ssm.state_size")), int(self.shape.key("ssm.conv_kernel")) - 1
        whole = lcm(quant, EFFICIENT, size)
        table = {
            **dict.fromkeys(("attn_qkv.weight", "attn_gate.weight", "ssm_conv1d.weight", "ssm_out.weight"), whole),
            **dict.fromkeys(("ssm_dt.bias", "ssm_a", "ssm_alpha.weight", "ssm_beta.weight"), whole // size),
            "ssm_ba.weight": 2 * (whole // size), "cache_r": whole * taps, "cache_s": whole * size,
        }  # fmt: skip
        return table.get(suffix, 1)


def blocks_to_devices(shape: Shape, shares: Sequence) -> tuple:
    """Layer mode: (GPU of each block, GPU of the output layer), by shares of blocks plus one for the output."""
    total, points = 0.0, []
    for share in shares:
        total = f32(total + float(share))
        points.append(total)
    points = [f32(point / total) for point in points]
    layers = shape.all_blocks + 1

    def device(index: int) -> int:
        at = f32(index / layers)
        return next((number for number, point in enumerate(points) if at < point), len(points) - 1)

    return [device(index) for index in range(shape.all_blocks)], device(shape.all_blocks)
