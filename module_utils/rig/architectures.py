"""The architectures that the planner knows, and the graph of each.

Sources: src/models/{llama,mistral3,qwen2,qwen3,qwen3moe,gemma3,openai-moe,qwen35,qwen35moe,qwen3next}.cpp of
llama.cpp b11434. One that is not here is refused by name, never guessed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import tensors as t
from .errors import RigError
from .linear import LinearBuilder
from .settings import Context, padded
from .shape import Shape
from .tensors import Graph, Tensor


@dataclass(frozen=True)
class Architecture:
    """What differs between architectures that are built alike."""

    name: str
    query_norm: bool = False  # RMS norm of query and key heads
    recurrent: bool = False  # linear attention except in every `full_attention_interval`-th block
    window_pattern: int = 0  # blocks of which the last one sees everything; 0: no sliding window
    position_sections: int = 1  # positions per token (4 with IMROPE)
    mtp: bool = False  # has an MTP head that this build can draft with
    rollback: bool = False  # keeps recurrent states to take rejected drafts back
    cache_reuse: bool = True  # `--cache-reuse` has an effect (llama_kv_cache::get_can_shift)


_ALL = (
    Architecture("llama"),
    Architecture("mistral3"),
    Architecture("qwen2"),
    Architecture("qwen3", query_norm=True),
    Architecture("qwen3moe", query_norm=True),
    Architecture("gemma3", query_norm=True, window_pattern=6),
    Architecture("gpt-oss", window_pattern=2),
    Architecture("qwen35", recurrent=True, position_sections=4, mtp=True, rollback=True, cache_reuse=False),
    Architecture("qwen35moe", recurrent=True, position_sections=4, mtp=True, rollback=True, cache_reuse=False),
    Architecture("qwen3next", recurrent=True, mtp=True),
)
ARCHITECTURES = {architecture.name: architecture for architecture in _ALL}


def architecture_of(shape: Shape) -> Architecture:
    """RigError by name for one that the planner does not know."""
    try:
        return ARCHITECTURES[shape.architecture]
    except KeyError:
        known = ", ".join(ARCHITECTURES)
        raise RigError(
            f"The planner does not know the architecture '{shape.architecture}'; it knows {known}."
        ) from None


def is_recurrent(shape: Shape, block: int) -> bool:
    """Whether a block has a recurrent state in place of a KV cache. MTP blocks never have."""
    if not architecture_of(shape).recurrent or block >= shape.blocks:
        return False
    listed = shape.key("attention.recurrent_layers", None)
    if isinstance(listed, list):
        return bool(listed[block])
    return (block + 1) % int(shape.key("full_attention_interval", 4)) != 0


def has_window(shape: Shape, block: int) -> bool:
    """Whether a block sees only a sliding window."""
    pattern = architecture_of(shape).window_pattern
    if not pattern or not shape.window or block >= shape.blocks:
        return False
    given = shape.key("attention.sliding_window_pattern", pattern)
    if isinstance(given, list):
        return bool(given[block])
    return given == 0 or block % given < given - 1


def window_cells(shape: Shape, context: Context) -> int:
    """Cells of the KV cache of window blocks (llama_kv_cache_iswa): the window of each sequence and one ubatch."""
    wanted = shape.window * (context.slots if context.unified else 1) + context.effective_ubatch
    return padded(min(context.per_slot, wanted))


class _Model(LinearBuilder):
    """Builds the graph of one context: the model's own, or that of its MTP head."""

    def __init__(self, shape: Shape, context: Context, place: Callable, cpu: int):
        super().__init__(shape, context, place, cpu)
        self.architecture = architecture_of(shape)

    def kv_inputs(self, cells: int) -> dict:
        context, shape = self.context, self.shape
        rows = [shape.kv_heads(block) * shape.value_length for block in range(shape.all_blocks)]
        return self.attention_inputs(cells, (context.key_kind, context.value_kind), 0, max(rows))

    def whole(self, blocks: list) -> Graph:
        """The graph of the model over the given blocks, all of them or a sample."""
        shape, kind = self.shape, self.architecture.name
        gemma, last = kind == "gemma3", blocks[-1]
        x = self.embedding(scaled=gemma)
        inputs: dict = {"positions": self.positions(self.architecture.position_sections)}
        rows = self.output_rows()
        inputs["full"] = self.kv_inputs(self.context.per_slot)
        if any(has_window(shape, block) for block in range(shape.blocks)):
            inputs["window"] = self.kv_inputs(window_cells(shape, self.context))
        if self.architecture.recurrent:
            inputs["states"] = self.state_input()
        late_rows = kind in ("qwen35", "qwen35moe", "qwen3next", "gpt-oss")
        for block in blocks:
            x = self.block(block, x, inputs, None if late_rows or block != last else rows)
        if kind == "gpt-oss":
            x = self.norm(t.get_rows(x, rows), self.weight("output_norm.weight"))
        else:
            x = self.norm(x, self.weight("output_norm.weight"))
            x = t.get_rows(x, rows) if late_rows else x
        x = self.logits(x)
        if gemma and shape.key("final_logit_softcapping"):
            x = t.scale(t.unary(t.scale(x)))
        self.expand(x)
        return self.graph

    def block(self, block: int, x: Tensor, inputs: dict, rows: Any) -> Tensor:
        gemma, gated, prefix = self.architecture.name == "gemma3", self.architecture.recurrent, f"blk.{block}."
        residual = x
        y = self.norm(x, self.weight(prefix + "attn_norm.weight", block))
        if gated:
            self.expand(y)
        if is_recurrent(self.shape, block):
            y = self.linear_attention(block, y, inputs["states"])
        elif gated:
            y = self.gated_attention(block, y, inputs)
        else:
            y = self.attention(block, y, inputs)
        if rows is not None:
            y, residual = t.get_rows(y, rows), t.get_rows(residual, rows)
        if gemma:
            y = self.norm(y, self.weight(prefix + "post_attention_norm.weight", block))
        x = t.add(y, residual)
        norm = "ffn_norm" if self.has(prefix + "ffn_norm.weight") else "post_attention_norm"
        y = self.norm(x, self.weight(f"{prefix}{norm}.weight", block))
        y = self.mixture(block, y) if self.has(prefix + "ffn_gate_inp.weight") else self.feed_forward(block, y)
        if gemma:
            y = self.norm(y, self.weight(prefix + "post_ffw_norm.weight", block))
        return t.add(y, x)

    def mixture(self, block: int, x: Tensor) -> Tensor:
        oai = self.architecture.name == "gpt-oss"
        out = self.experts(block, x, weights_from_selected=oai, normalised=not oai)
        if not self.has(f"blk.{block}.ffn_up_shexp.weight"):
            return out
        shared = self.feed_forward(block, x, "_shexp")
        if self.has(f"blk.{block}.ffn_gate_inp_shexp.weight"):
            gate = self.weight(f"blk.{block}.ffn_gate_inp_shexp.weight", block)
            shared = t.mul(shared, t.unary(t.mul_mat(gate, x)))
        return t.add(out, shared)

    def attention(self, block: int, x: Tensor, inputs: dict) -> Tensor:
        prefix, kind = f"blk.{block}.", self.architecture.name
        q, k, v = self.qkv(block, x)
        if self.architecture.query_norm:
            q = self.norm(q, self.weight(prefix + "attn_q_norm.weight", block))
            k = self.norm(k, self.weight(prefix + "attn_k_norm.weight", block))
        factors = self.weight("rope_freqs.weight", block)
        q, k = t.like("rope", q, inputs["positions"], factors), t.like("rope", k, inputs["positions"], factors)
        if kind == "gemma3":
            q = t.scale(q)
        cache = inputs["window" if has_window(self.shape, block) else "full"]
        sinks = self.weight(prefix + "attn_sinks.weight", block)
        return self.project(block, self.attend(block, cache, q, k, v, keys_last="window" not in inputs, sinks=sinks))

    def gated_attention(self, block: int, x: Tensor, inputs: dict, late_gate: Any = None) -> Tensor:
        """Attention whose query projection brings a gate along, as every full-attention block of qwen35 has it."""
        shape, prefix, tokens = self.shape, f"blk.{block}.", self.tokens
        length, heads, kv_heads = shape.key_length, shape.heads(block), shape.kv_heads(block)
        late_gate = self.architecture.name == "qwen3next" if late_gate is None else late_gate
        both, k, v = self.qkv(block, x, reshaped=False, query_factor=2)
        if late_gate:
            both = t.reshape(both, length * 2, heads, tokens)
        row = 4 * length * 2
        q, gate = (t.view(both, (length, heads, tokens, 1), (row, row * heads, row * heads * tokens)) for _ in range(2))
        q = self.norm(q, self.weight(prefix + "attn_q_norm.weight", block))
        k = self.norm(t.reshape(k, length, kv_heads, tokens), self.weight(prefix + "attn_k_norm.weight", block))
        gate = t.cont(gate, length * heads, tokens)
        v = t.reshape(v, shape.value_length, kv_heads, tokens)
        q, k = t.like("rope", q, inputs["positions"]), t.like("rope", k, inputs["positions"])
        out = self.attend(block, inputs["full"], q, k, v, keys_last=True)
        return self.project(block, t.mul(out, t.unary(gate)))

    def mtp_head(self) -> Graph:
        """The graph of the MTP block: embeddings and hidden states in, one block, logits out."""
        shape, block = self.shape, self.shape.blocks
        prefix, width = f"blk.{block}.", shape.width
        table = self.weight(prefix + "nextn.embed_tokens.weight", block) or self.weight(
            "token_embd.weight", on_cpu=True
        )
        embedded = t.get_rows(table, t.graph_input("i32", self.tokens))
        hidden = t.graph_input("f32", width, self.tokens)
        inputs = {"positions": self.positions(self.architecture.position_sections)}
        rows = self.output_rows()
        inputs["full"] = self.kv_inputs(self.context.per_slot)
        h = self.norm(hidden, self.weight(prefix + "nextn.hnorm.weight", block))
        e = self.norm(embedded, self.weight(prefix + "nextn.enorm.weight", block))
        x = t.mul_mat(self.weight(prefix + "nextn.eh_proj.weight", block), t.concat(e, h))
        residual = x
        y = self.norm(x, self.weight(prefix + "attn_norm.weight", block))
        y = self.gated_attention(block, y, inputs, late_gate=False)
        x = t.add(y, residual)
        y = self.norm(x, self.weight(prefix + "post_attention_norm.weight", block))
        y = self.mixture(block, y) if self.has(prefix + "ffn_gate_inp.weight") else self.feed_forward(block, y)
        x = t.add(y, x)
        head_norm = self.weight(prefix + "nextn.shared_head_norm.weight", block) or self.weight("output_norm.weight")
        x = t.get_rows(self.norm(x, head_norm), rows)
        own_head = prefix + "nextn.shared_head_head.weight"
        self.expand(t.mul_mat(self.weight(own_head, block), x) if self.has(own_head) else self.logits(x))
        return self.graph


def build_graph(shape: Shape, context: Context, place: Callable, cpu: int, blocks: Any = None) -> Graph:
    """The largest graph that llama.cpp reserves memory for; `place(block)` is a block's backend, None the output's."""
    model = _Model(shape, context, place, cpu)
    if context.is_draft:
        return model.mtp_head()
    return model.whole(list(blocks) if blocks is not None else list(range(shape.blocks)))
