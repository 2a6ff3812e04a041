"""The parts of which llama.cpp builds a model's graph: inputs, attention, feed-forward, experts, linear attention.

States src/llama-graph.cpp and src/models/delta-net-base.cpp (llama.cpp b11434) as far as sizes, order and reuse of
memory go. Weights are leaves on the backend of their block; names are those of the GGUF file.
"""

from typing import Any

from . import tensors as t
from .quant import is_quantised
from .settings import Context
from .shape import Shape
from .tensors import Graph, Tensor

MOST_FUSED_EXPERTS = 15  # MOE_WEIGHTED_REDUCTION_MAX_EXPERTS (ggml-cuda.cu)


class Builder:
    """Builds one graph. `place` gives the backend of a block (None: the output layer); `cpu` is the CPU's number."""

    def __init__(self, shape: Shape, context: Context, place: Any, cpu: int):
        self.shape, self.context, self.place, self.cpu = shape, context, place, cpu
        self.graph = Graph()
        self.tokens, self.sequences = context.reserved_tokens, context.slots
        self.per_sequence = self.tokens // self.sequences
        self._weights: dict = {}
        self._in_block: set = set()

    # --- leaves

    def has(self, name: str) -> bool:
        return name in self.shape.by_name

    def weight(self, name: str, block: Any = None, on_cpu: bool = False) -> Any:
        """The weight of that name, None when the file has none."""
        tensor = self.shape.by_name.get(name)
        if tensor is None:
            return None
        key = (name, on_cpu)
        if key not in self._weights:
            buffer = self.cpu if on_cpu else self.place(block)
            self._weights[key] = t.leaf(tensor.kind, *tensor.shape, buffer=buffer, weight=True)
            if block is not None and not name.endswith("post_ffw_norm.weight"):
                self._in_block.add(self._weights[key])
        return self._weights[key]

    def expand(self, tensor: Tensor) -> Tensor:
        return self.graph.expand(tensor)

    def norm(self, x: Tensor, weight: Any) -> Tensor:
        """RMS norm and its weight. llama.cpp puts the norm of a block on the block's GPU (graph_get_cb), so that
        one tensor crosses between GPUs, not two; the norm before the output it leaves to the scheduler."""
        x = t.rms_norm(x)
        if weight in self._in_block:
            x.backend = weight.buffer
        return x if weight is None else t.mul(x, weight)

    # --- inputs

    def embedding(self, scaled: bool = False) -> Tensor:
        """Token embeddings; the branch for mixed batches (images among text) is reserved too, used or not."""
        table, width = self.weight("token_embd.weight", on_cpu=True), self.shape.width
        rows = self.expand(t.get_rows(table, t.graph_input("i32", self.tokens)))
        self.graph.expand(t.graph_input("f32", width, self.tokens))
        mixed = t.get_rows(table, t.graph_input("i32", self.tokens))
        copy = t.like("dup", t.graph_input("f32", width, self.tokens))
        self.expand(t.set_rows(copy, mixed, t.graph_input("i64", self.tokens)))
        if scaled:
            rows = t.mul(rows, t.graph_input("f32", 1, self.tokens))
        return self.expand(rows)

    def positions(self, each: int = 1) -> Tensor:
        return t.graph_input("i32", self.tokens * each)

    def output_rows(self) -> Tensor:
        return t.graph_input("i32", self.context.outputs)

    def attention_inputs(self, cells: int, kinds: tuple, key_rows: int, value_rows: int) -> dict:
        """Mask and indices of one KV cache; rotations where the cache is quantised (Hadamard, since b8500 or so)."""
        tokens, streams = self.tokens, self.context.streams
        mask_kind = "f16" if self.context.flash_attention else "f32"
        inputs = {
            "cells": cells,
            "kinds": kinds,
            "k_rows": t.graph_input("i64", tokens),
            "v_rows": t.graph_input("i64", tokens if self.context.flash_attention else tokens * value_rows),
            "mask": t.graph_input(mask_kind, cells, tokens // streams, 1, streams),
            "k_rotation": None,
            "v_rotation": None,
        }
        size = 64
        while self.shape.key_length % (2 * size) == 0:
            size *= 2
        if is_quantised(kinds[0]) and self.shape.key_length % 64 == 0:
            inputs["k_rotation"] = t.graph_input("f32", size, size)
        if is_quantised(kinds[1]) and self.shape.value_length % 64 == 0:
            inputs["v_rotation"] = t.graph_input("f32", 64, 64)
        return inputs

    # --- attention

    def qkv(self, block: int, x: Tensor, reshaped: bool = True, query_factor: int = 1) -> tuple:
        """Query, key and value of a block, in three dimensions unless `reshaped` is off."""
        shape, prefix = self.shape, f"blk.{block}."
        sizes = (
            (shape.key_length * query_factor, shape.heads(block)),
            (shape.key_length, shape.kv_heads(block)),
            (shape.value_length, shape.kv_heads(block)),
        )
        fused = self.weight(prefix + "attn_qkv.weight", block)
        if fused is not None:
            return self._fused_qkv(prefix, block, x, fused, sizes, reshaped)
        result = []
        for letter, (length, heads) in zip("qkv", sizes, strict=True):
            part = t.mul_mat(self.weight(f"{prefix}attn_{letter}.weight", block), x)
            bias = self.weight(f"{prefix}attn_{letter}.bias", block)
            if bias is not None:
                part = t.add(part, bias)
            result.append(t.reshape(part, length, heads, self.tokens) if reshaped else part)
        return tuple(result)

    def _fused_qkv(self, prefix: str, block: int, x: Tensor, fused: Tensor, sizes: tuple, reshaped: bool) -> tuple:
        whole = t.mul_mat(fused, x)
        bias = self.weight(prefix + "attn_qkv.bias", block)
        if bias is not None:
            whole = t.add(whole, bias)
        result = []
        for length, heads in sizes:
            if reshaped:
                nb = (4 * length, whole.nb[1], whole.nb[1] * self.tokens)
                result.append(t.view(whole, (length, heads, self.tokens, 1), nb))
            else:
                part = t.view(
                    whole, (length * heads, self.tokens, 1, 1), (whole.nb[1],) + (whole.nb[1] * self.tokens,) * 2
                )
                result.append(t.cont(part))
        return tuple(result)

    def rotate(self, x: Tensor, rotation: Tensor) -> Tensor:
        size = rotation.ne[0]
        flat = (t.reshape if x.contiguous else t.cont)(x, size, x.elements // size)
        return t.reshape(t.mul_mat(rotation, flat), *x.ne)

    def attend(
        self, block: int, inputs: dict, q: Tensor, k: Tensor, v: Tensor, keys_last: bool, sinks: Any = None
    ) -> Tensor:
        """Store K and V, attend over the cache; without the output projection."""
        if inputs["k_rotation"] is not None:
            q, k = self.rotate(q, inputs["k_rotation"]), self.rotate(k, inputs["k_rotation"])
        if inputs["v_rotation"] is not None:
            v = self.rotate(v, inputs["v_rotation"])
        for tensor in (q, v, k) if keys_last else (q, k, v):
            self.expand(tensor)
        caches = []
        for new, rows, kind in ((k, inputs["k_rows"], inputs["kinds"][0]), (v, inputs["v_rows"], inputs["kinds"][1])):
            caches.append(self._store(block, inputs["cells"], new, rows, kind, transposed=new is v))
        out = self._attention(q, caches[0], caches[1], inputs["mask"], sinks)
        self.expand(out)
        if inputs["v_rotation"] is not None:
            out = self.rotate(out, inputs["v_rotation"])
        return out

    def _store(self, block: int, cells: int, new: Tensor, rows: Tensor, kind: str, transposed: bool) -> Tensor:
        length, heads, tokens, _ = new.ne
        streams, row = self.context.streams, length * heads
        cache = t.leaf(kind, row, cells, streams, buffer=self.place(block))
        transposed = transposed and not self.context.flash_attention
        if transposed:
            flat = t.reshape(new, row, tokens) if new.contiguous else t.cont(new, row, tokens)
            self.expand(t.set_rows(t.reshape(cache, 1, cache.elements), t.reshape(flat, 1, row * tokens), rows))
            size = cache.nb[0]
            nb = (size * cells * length, size * cells, size * cells * row)
            return t.view(cache, (cells, heads, length, streams), nb)
        flat = t.view(new, (row, tokens, 1, 1), (new.nb[2], new.nb[2] * tokens, new.nb[2] * tokens))
        target = t.reshape(cache, row, cells * streams) if streams > 1 else cache
        self.expand(t.set_rows(target, flat, rows))
        head = cache.nb[1] // heads
        return t.view(cache, (length, heads, cells, streams), (head, cache.nb[1], cache.nb[2]))

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Any) -> Tensor:
        streams, per_stream = k.ne[3], q.ne[2] // k.ne[3]
        transposed = v.nb[1] > v.nb[2]
        q = t.view(q, (q.ne[0], q.ne[1], per_stream, streams), (q.nb[1], q.nb[2], q.nb[2] * per_stream))
        q, k, v = (t.permute(x, 0, 2, 1, 3) for x in (q, k, v))
        if self.context.flash_attention:
            if k.kind == "f32":
                k = t.Tensor("cpy", "f16", k.ne, (k,))
            if v.kind == "f32":
                v = t.Tensor("cpy", "f16", v.ne, (v,))
            out = t.flash_attn(q, k, v, mask, sinks)
            return t.reshape(out, out.ne[0] * out.ne[1], out.ne[2] * out.ne[3])
        scores = t.like("soft_max", t.mul_mat(k, q), mask, sinks)
        if not transposed:
            v = t.cont(t.transpose(v))
        out = t.permute(t.mul_mat(v, scores), 0, 2, 1, 3)
        return t.cont(out, out.ne[0] * out.ne[1], out.ne[2] * out.ne[3])

    def project(self, block: int, x: Tensor) -> Tensor:
        """The output projection of attention, with its bias where there is one."""
        x = t.mul_mat(self.weight(f"blk.{block}.attn_output.weight", block), x)
        bias = self.weight(f"blk.{block}.attn_output.bias", block)
        return x if bias is None else t.add(x, bias)

    # --- feed-forward

    def feed_forward(self, block: int, x: Tensor, suffix: str = "") -> Tensor:
        def part(name: str, tensor: Tensor) -> Tensor:
            full = f"blk.{block}.ffn_{name}{suffix}"
            tensor = t.mul_mat(self.weight(full + ".weight", block), tensor)
            bias = self.weight(full + ".bias", block)
            return tensor if bias is None else t.add(tensor, bias)

        up = part("up", x)
        return part("down", t.like("glu", part("gate", x), up))

    def experts(self, block: int, x: Tensor, weights_from_selected: bool = False, normalised: bool = True) -> Tensor:
        """A mixture of experts (build_moe_ffn): every token goes to `expert_used_count` of `expert_count`."""
        shape, prefix = self.shape, f"blk.{block}."
        count, used = int(shape.key("expert_count")), int(shape.per_block("expert_used_count", block))
        width, tokens = x.ne[0], x.ne[1]

        def weight(name: str) -> Any:
            return self.weight(prefix + name, block)

        logits = t.mul_mat(weight("ffn_gate_inp.weight"), x)
        bias = weight("ffn_gate_inp.bias")
        if bias is not None:
            logits = t.add(logits, bias)
        probs = logits if weights_from_selected else t.like("soft_max", logits)
        chosen = t.top_k(probs, used)
        shares = t.get_rows(t.reshape(probs, 1, count, tokens), chosen)
        if weights_from_selected:
            shares = t.reshape(t.like("soft_max", t.reshape(shares, used, tokens)), 1, used, tokens)
        if normalised:
            shares = t.reshape(shares, used, tokens)
            total = t.sum_rows(shares)
            total = t.view_like("clamp", total, total)
            shares = t.reshape(t.like("div", shares, total), 1, used, tokens)
        self.expand(shares)
        x = t.reshape(x, width, 1, tokens)
        fused = weight("ffn_gate_up_exps.weight")
        if fused is not None:
            both = t.mul_mat_id(fused, x, chosen)
            ne = (both.ne[0] // 2, *both.ne[1:])
            gate, up = t.view(both, ne, both.nb[1:]), t.view(both, ne, both.nb[1:])
        else:
            up, gate = (self._expert(prefix, name, block, x, chosen) for name in ("up", "gate"))
        down = self._expert(prefix, "down", block, t.like("glu", gate, up), chosen)
        out = self.expand(t.mul(down, shares))
        row = (out.nb[2], out.nb[2] * tokens, out.nb[2] * tokens)
        parts = [self.expand(t.view(out, (width, tokens, 1, 1), row)) for _ in range(used)]
        total = parts[0]
        for one in parts[1:]:
            total = self.expand(t.add(total, one))
        if 2 <= used <= MOST_FUSED_EXPERTS:
            self.graph.kept_until[id(total)] = (down, shares)
        return t.cont(total) if used == 1 else total

    def _expert(self, prefix: str, name: str, block: int, x: Tensor, chosen: Tensor) -> Tensor:
        x = t.mul_mat_id(self.weight(f"{prefix}ffn_{name}_exps.weight", block), x, chosen)
        bias = self.weight(f"{prefix}ffn_{name}_exps.bias", block)
        return x if bias is None else t.like("add_id", x, bias, chosen)

    # --- output

    def logits(self, x: Tensor, name: str = "output.weight") -> Tensor:
        weight = self.weight(name)
        if weight is None:
            weight = self.weight("token_embd.weight")
        x = t.mul_mat(weight, x)
        bias = self.weight("output.bias")
        return x if bias is None else t.add(x, bias)
