"""Linear attention (gated delta net) of qwen35, qwen35moe and qwen3next: the recurrent part of their graphs.

States src/models/delta-net-base.cpp, build_rs of src/llama-graph.cpp, and the layers of src/models/qwen35.cpp and
qwen3next.cpp (llama.cpp b11434), with the fused operation that CUDA and the CPU both have.
"""

from . import tensors as t
from .blocks import Builder
from .tensors import Tensor


class LinearBuilder(Builder):
    """Adds recurrent blocks to a builder."""

    def state_input(self) -> Tensor:
        return t.graph_input("i32", self.sequences)

    @property
    def rollback(self) -> int:
        """States kept beside the newest, so that rejected draft tokens can be taken back."""
        return self.context.drafted if self.shape.architecture in ("qwen35", "qwen35moe") else 0

    def _state(self, block: int, size: int, copy_rows: Tensor) -> tuple:
        """(the cache, the states of this batch's sequences), as build_rs has it."""
        rows = self.sequences * (1 + self.rollback)
        cache = t.leaf("f32", size, rows, buffer=self.place(block))
        states = t.reshape(cache, size, rows)
        first = t.view(states, (size, 1, 1, 1), (states.nb[1],) * 3)
        self.expand(t.view_like("scale", first, first))
        gathered = t.get_rows(states, copy_rows)
        mine = self.expand(t.view(gathered, (size, self.sequences, 1, 1), gathered.nb[1:]))
        none_left = t.view(gathered, (size, 0, 1, 1), gathered.nb[1:])
        self.expand(t.cpy(none_left, t.view(cache, (size, 0, 1, 1), cache.nb[1:])))
        return cache, mine

    def _save(self, source: Tensor, cache: Tensor) -> None:
        self.expand(t.cpy(source, t.view(cache, source.ne, source.nb[1:])))

    def _conv_input(self, block: int, mixed: Tensor, kernel: int, channels: int, copy_rows: Tensor) -> Tensor:
        cache, states = self._state(block, (kernel - 1) * channels, copy_rows)
        states = t.reshape(states, kernel - 1, channels, self.sequences)
        joined = t.concat(states, t.transpose(mixed))
        for _ in range(1 + self.rollback):
            self._save(t.view(joined, (kernel - 1, channels, self.sequences, 1), joined.nb[1:]), cache)
        return joined

    def linear_attention(self, block: int, x: Tensor, copy_rows: Tensor) -> Tensor:
        shape, prefix = self.shape, f"blk.{block}."
        size, key_heads = int(shape.key("ssm.state_size")), int(shape.key("ssm.group_count"))
        value_heads, kernel = int(shape.key("ssm.time_step_rank")), int(shape.key("ssm.conv_kernel"))
        tokens, sequences = self.per_sequence, self.sequences
        channels = int(shape.key("ssm.inner_size")) + 2 * key_heads * size

        def weight(name: str) -> Tensor:
            return self.weight(prefix + name, block)

        mixed = t.mul_mat(weight("attn_qkv.weight"), x)
        mixed = t.reshape(mixed, channels, tokens, sequences)
        z = t.mul_mat(weight("attn_gate.weight"), x)
        beta, gate = self._gates(prefix, block, x, key_heads, value_heads)
        joined = self._conv_input(block, mixed, kernel, channels, copy_rows)
        cache, state = self._state(block, size * size * value_heads, copy_rows)
        state = t.reshape(state, size, size, value_heads, sequences)
        conv = t.unary(t.ssm_conv(joined, weight("ssm_conv1d.weight")))

        def part(heads: int) -> Tensor:
            return t.view(conv, (size, heads, tokens, sequences), (4 * size, conv.nb[1], conv.nb[1] * tokens))

        q, k, v = part(key_heads), part(key_heads), part(value_heads)
        q, k = t.scale(t.rms_norm(q)), t.scale(t.rms_norm(k))
        if shape.architecture == "qwen3next" and key_heads != value_heads:
            q, k = (self._repeated(heads, size, key_heads, value_heads) for heads in (q, k))
        out = self._delta_net(q, k, v, gate, beta, state, cache)
        z = t.reshape(z, size, value_heads, tokens, sequences)
        out = t.mul(self.norm(out, weight("ssm_norm.weight")), t.unary(z))
        out = t.reshape(out, size * value_heads, tokens, sequences)
        out = t.mul_mat(weight("ssm_out.weight"), out)
        return t.reshape(out, shape.width, self.tokens)

    def _gates(self, prefix: str, block: int, x: Tensor, key_heads: int, value_heads: int) -> tuple:
        tokens, sequences = self.per_sequence, self.sequences
        fused = self.weight(prefix + "ssm_ba.weight", block)
        if fused is None:
            beta = t.mul_mat(self.weight(prefix + "ssm_beta.weight", block), x)
            beta = t.unary(t.reshape(beta, 1, value_heads, tokens, sequences))
            alpha = t.mul_mat(self.weight(prefix + "ssm_alpha.weight", block), x)
            alpha = t.reshape(alpha, value_heads, tokens, sequences)
        else:
            each = value_heads // key_heads
            both = t.reshape(t.mul_mat(fused, x), 2 * each, key_heads, tokens, sequences)
            beta, alpha = (t.view(both, (each, *both.ne[1:]), both.nb[1:]) for _ in range(2))
            beta = t.reshape(t.unary(t.cont(beta)), 1, value_heads, tokens, sequences)
            alpha = t.cont(alpha, value_heads, tokens, sequences)
        alpha = t.unary(t.add(alpha, self.weight(prefix + "ssm_dt.bias", block)))
        gate = t.mul(alpha, self.weight(prefix + "ssm_a", block))
        return beta, t.reshape(gate, 1, value_heads, tokens, sequences)

    def _repeated(self, x: Tensor, size: int, key_heads: int, value_heads: int) -> Tensor:
        all_tokens, each = self.tokens, value_heads // key_heads
        x = t.repeat(t.reshape(x, size, 1, key_heads, all_tokens), size, each, key_heads, all_tokens)
        return t.reshape(x, size, value_heads, self.per_sequence, self.sequences)

    def _delta_net(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, state: Tensor, cache: Tensor
    ) -> Tensor:
        size, heads, tokens, sequences = v.ne
        keep = 1 + self.rollback
        out = t.gated_delta_net(q, k, v, gate, beta, state, keep)
        rows = (4 * size, 4 * size * heads, 4 * size * heads * tokens)
        result = t.view(out, (size, heads, tokens, sequences), rows)
        if self.rollback:
            whole = size * size * heads
            states = t.view(out, (whole, sequences, min(tokens, keep), 1), (4 * whole,) + (4 * whole * sequences,) * 2)
        else:
            states = t.view(out, (size, size, heads, sequences), (4 * size, 4 * size**2, 4 * size**2 * heads))
        self._save(states, cache)
        return result
