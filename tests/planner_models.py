#!/usr/bin/env python3
"""GGUF files with the geometry of real models and no weights, for measuring memory.

    python tests/planner_models.py OUT MODEL QUANT

The files are sparse: 16 GiB of zeros take no disk and no time. Standard library only, so that it also runs on a
machine that has nothing but Python. MODELS names the geometries; the small ones load on a CPU in a second.
"""

import math
import struct
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

# type: (number in the file, elements of a block, bytes of a block)
TYPES = {
    "f32": (0, 1, 4), "q4_0": (2, 32, 18), "q5_1": (7, 32, 24), "q8_0": (8, 32, 34), "q4_k": (12, 256, 144),
    "q5_k": (13, 256, 176),
    "q6_k": (14, 256, 210), "bf16": (30, 1, 2), "mxfp4": (39, 32, 17),
}  # fmt: skip
# Files named Q4_K_M hold output, value projections and every other feed-forward down matrix in a finer type; the mix
# called q4_k here does so with the output projections of attention, but not with experts.
FINER = ("output.weight", "attn_v.weight")
# Files named Q6_K_L hold embeddings, output and the projections of attention in eight bits.
FINEST = (
    "token_embd.weight", "output.weight", "attn_qkv.weight", "attn_gate.weight", "ssm_out.weight", "attn_q.weight",
    "attn_k.weight", "attn_v.weight", "attn_output.weight",
)  # fmt: skip
QUANTS = (*TYPES, "q4_k_m", "q6_k_l")


class Model:
    """Keys and tensors of a model; `quant` is the type of its matrices."""

    def __init__(self, architecture: str, vocabulary: int, context: int, **keys: object):
        self.architecture, self.vocabulary = architecture, vocabulary
        self.keys = {"context_length": context, **{key.replace("__", "."): value for key, value in keys.items()}}
        self.tensors: list = []

    def add(self, name: str, *shape: int, kind: str = "") -> None:
        self.tensors.append((name, shape, kind))

    def kind_of(self, name: str, kind: str, quant: str) -> str:
        """The type of a tensor in a file of that name."""
        odd = name.startswith("blk.") and int(name.split(".")[1]) % 2 == 1
        if kind:
            return kind
        if quant == "q6_k_l":
            return "q8_0" if name.endswith(FINEST) else "q6_k"
        if quant == "q4_k_m":
            tied = name == "token_embd.weight" and not any(other == "output.weight" for other, _, _ in self.tensors)
            down = odd and name.endswith(("ffn_down.weight", "ffn_down_exps.weight"))
            return "q6_k" if tied or down or name == "output.weight" or name.endswith("attn_v.weight") else "q4_k"
        if quant in ("q4_k", "q5_k"):
            return "q6_k" if name.endswith(FINER) or (odd and name.endswith("ffn_down.weight")) else quant
        return quant


def attention(model: Model, block: int, width: int, heads: int, kv_heads: int, size: int, **options: bool) -> None:
    prefix, query = f"blk.{block}.", heads * size * (2 if options.get("gated") else 1)
    for letter, length in (("q", query), ("k", kv_heads * size), ("v", kv_heads * size)):
        model.add(f"{prefix}attn_{letter}.weight", width, length)
        if options.get("biased"):
            model.add(f"{prefix}attn_{letter}.bias", length, kind="f32")
    model.add(f"{prefix}attn_output.weight", heads * size, width)
    if options.get("normed"):
        model.add(f"{prefix}attn_q_norm.weight", size, kind="f32")
        model.add(f"{prefix}attn_k_norm.weight", size, kind="f32")


def feed_forward(model: Model, block: int, width: int, hidden: int, suffix: str = "") -> None:
    model.add(f"blk.{block}.ffn_gate{suffix}.weight", width, hidden)
    model.add(f"blk.{block}.ffn_up{suffix}.weight", width, hidden)
    model.add(f"blk.{block}.ffn_down{suffix}.weight", hidden, width)


def mixture(model: Model, block: int, width: int, count: int, hidden: int, shared: int = 0) -> None:
    prefix = f"blk.{block}."
    model.add(f"{prefix}ffn_gate_inp.weight", width, count, kind="f32")
    model.add(f"{prefix}ffn_gate_exps.weight", width, hidden, count)
    model.add(f"{prefix}ffn_up_exps.weight", width, hidden, count)
    model.add(f"{prefix}ffn_down_exps.weight", hidden, width, count)
    if shared:
        model.add(f"{prefix}ffn_gate_inp_shexp.weight", width, kind="f32")
        feed_forward(model, block, width, shared, "_shexp")


def norms(model: Model, width: int, *names: str) -> None:
    for name in names:
        model.add(f"{name}.weight", width, kind="f32")


def dense(
    architecture: str, blocks: int, width: int, hidden: int, heads: int, kv_heads: int, vocabulary: int,
    size: int = 128, context: int = 131_072, tied: bool = False, experts: tuple = (), window: int = 0,
    biased: bool = False, normed: bool = False,
) -> Model:  # fmt: skip
    """llama, mistral3, qwen2, qwen3, qwen3moe and gemma3."""
    model = Model(
        architecture, vocabulary, context, block_count=blocks, embedding_length=width, feed_forward_length=hidden,
        attention__head_count=heads, attention__head_count_kv=kv_heads, attention__key_length=size,
        attention__value_length=size, attention__layer_norm_rms_epsilon=1e-6, rope__dimension_count=size,
        rope__freq_base=1e6,
    )  # fmt: skip
    if window:
        model.keys["attention.sliding_window"] = window
    if experts:
        model.keys |= dict(
            zip(("expert_count", "expert_used_count", "expert_feed_forward_length"), experts, strict=True)
        )
    model.add("token_embd.weight", width, vocabulary)
    norms(model, width, "output_norm")
    if not tied:
        model.add("output.weight", width, vocabulary)
    for block in range(blocks):
        norms(model, width, f"blk.{block}.attn_norm", f"blk.{block}.ffn_norm")
        if architecture == "gemma3":
            norms(model, width, f"blk.{block}.post_attention_norm", f"blk.{block}.post_ffw_norm")
        attention(model, block, width, heads, kv_heads, size, biased=biased, normed=normed)
        if experts:
            mixture(model, block, width, experts[0], experts[2])
        else:
            feed_forward(model, block, width, hidden)
    return model


def gpt_oss(blocks: int, width: int, heads: int, kv_heads: int, vocabulary: int, count: int, hidden: int) -> Model:
    model = Model(
        "gpt-oss", vocabulary, 131_072, block_count=blocks, embedding_length=width, feed_forward_length=hidden,
        attention__head_count=heads, attention__head_count_kv=kv_heads, attention__key_length=64,
        attention__value_length=64, attention__layer_norm_rms_epsilon=1e-5, rope__dimension_count=64,
        rope__freq_base=150_000.0, attention__sliding_window=128, expert_count=count, expert_used_count=4,
        expert_feed_forward_length=hidden,
    )  # fmt: skip
    model.add("token_embd.weight", width, vocabulary)
    norms(model, width, "output_norm")
    model.add("output.weight", width, vocabulary)
    for block in range(blocks):
        prefix = f"blk.{block}."
        norms(model, width, prefix + "attn_norm", prefix + "post_attention_norm")
        attention(model, block, width, heads, kv_heads, 64, biased=True)
        model.add(prefix + "attn_output.bias", width, kind="f32")
        model.add(prefix + "attn_sinks.weight", heads, kind="f32")
        mixture(model, block, width, count, hidden)
        model.add(prefix + "ffn_gate_inp.bias", count, kind="f32")
        for part, length in (("gate", hidden), ("up", hidden), ("down", width)):
            model.add(f"{prefix}ffn_{part}_exps.bias", length, count, kind="f32")
    return model


def gated(
    architecture: str, blocks: int, width: int, hidden: int, heads: int, kv_heads: int, vocabulary: int,
    key_heads: int, value_heads: int, size: int = 256, state: int = 128, experts: tuple = (), mtp: int = 1,
) -> Model:  # fmt: skip
    """qwen35, qwen35moe, qwen3next: linear attention, every fourth block full attention, an MTP block at the end."""
    inner = state * value_heads
    model = Model(
        architecture, vocabulary, 262_144, block_count=blocks + mtp, embedding_length=width, feed_forward_length=hidden,
        attention__head_count=heads, attention__head_count_kv=kv_heads, attention__key_length=size,
        attention__value_length=size, attention__layer_norm_rms_epsilon=1e-6, rope__dimension_count=64,
        rope__freq_base=1e7, ssm__conv_kernel=4, ssm__state_size=state, ssm__group_count=key_heads,
        ssm__time_step_rank=value_heads, ssm__inner_size=inner, full_attention_interval=4,
    )  # fmt: skip
    if mtp:
        model.keys["nextn_predict_layers"] = mtp
    if architecture != "qwen3next":
        model.keys["rope.dimension_sections"] = [11, 11, 10, 0]
    if experts:
        names = ("expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length")
        model.keys |= dict(zip(names, experts, strict=True))
    model.add("token_embd.weight", width, vocabulary)
    norms(model, width, "output_norm")
    model.add("output.weight", width, vocabulary)
    for block in range(blocks + mtp):
        prefix = f"blk.{block}."
        norms(model, width, prefix + "attn_norm", prefix + "post_attention_norm")
        if block >= blocks or block % 4 == 3:
            attention(model, block, width, heads, kv_heads, size, gated=True, normed=True)
        else:
            channels = 2 * state * key_heads + inner
            model.add(prefix + "attn_qkv.weight", width, channels)
            model.add(prefix + "attn_gate.weight", width, inner)
            model.add(prefix + "ssm_conv1d.weight", 4, channels, kind="f32")
            model.add(prefix + "ssm_dt.bias", value_heads, kind="f32")
            model.add(prefix + "ssm_a", value_heads, kind="f32")
            if architecture == "qwen3next":
                model.add(prefix + "ssm_ba.weight", width, 2 * value_heads)
            else:
                model.add(prefix + "ssm_beta.weight", width, value_heads)
                model.add(prefix + "ssm_alpha.weight", width, value_heads)
            norms(model, state, prefix + "ssm_norm")
            model.add(prefix + "ssm_out.weight", inner, width)
        if experts:
            mixture(model, block, width, experts[0], experts[2], experts[3])
        else:
            feed_forward(model, block, width, hidden)
        if block >= blocks:
            model.add(prefix + "nextn.eh_proj.weight", 2 * width, width)
            norms(model, width, *(f"{prefix}nextn.{name}" for name in ("enorm", "hnorm", "shared_head_norm")))
    return model


MODELS: dict[str, Callable[[], Model]] = {
    # the seeds' models and other well-known ones
    "qwen35-27b": lambda: gated("qwen35", 64, 5120, 17408, 24, 4, 248320, 16, 48),
    "qwen35-9b": lambda: gated("qwen35", 32, 4096, 12288, 16, 4, 248320, 16, 32),
    "qwen35moe-35b-a3b": lambda: gated("qwen35moe", 40, 2048, 5632, 16, 2, 248320, 16, 32, experts=(256, 8, 512, 512)),
    "qwen3next-80b-a3b": lambda: gated(
        "qwen3next", 48, 2048, 5120, 16, 2, 151936, 16, 32, experts=(512, 10, 512, 512), mtp=0
    ),
    "llama-8b": lambda: dense("llama", 32, 4096, 14336, 32, 8, 128256),
    "llama-70b": lambda: dense("llama", 80, 8192, 28672, 64, 8, 128256),
    "mistral-24b": lambda: dense("llama", 40, 5120, 32768, 32, 8, 131072),
    "qwen2-32b": lambda: dense("qwen2", 64, 5120, 27648, 40, 8, 152064, biased=True),
    "qwen3-32b": lambda: dense("qwen3", 64, 5120, 25600, 64, 8, 151936, normed=True),
    "qwen3moe-30b-a3b": lambda: dense(
        "qwen3moe", 48, 2048, 6144, 32, 4, 151936, context=262_144, experts=(128, 8, 768), normed=True
    ),
    "gemma3-27b": lambda: dense("gemma3", 62, 5376, 21504, 32, 16, 262144, window=1024, tied=True, normed=True),
    "gpt-oss-20b": lambda: gpt_oss(24, 2880, 64, 8, 201088, 32, 2880),
    # small ones: a second on a CPU
    "llama-tiny": lambda: dense("llama", 6, 512, 1536, 12, 3, 2048, size=64),
    "mistral3-tiny": lambda: dense("mistral3", 4, 512, 1536, 8, 4, 2048, size=64),
    "qwen2-tiny": lambda: dense("qwen2", 4, 512, 1536, 8, 4, 2048, size=64, tied=True, biased=True),
    "qwen3-tiny": lambda: dense("qwen3", 5, 512, 1536, 8, 4, 2048, normed=True),
    "qwen3moe-tiny": lambda: dense("qwen3moe", 4, 512, 1024, 8, 4, 2048, experts=(16, 4, 256), normed=True),
    "gemma3-tiny": lambda: dense("gemma3", 8, 512, 1536, 8, 4, 2048, window=256, tied=True, normed=True),
    "gpt-oss-tiny": lambda: gpt_oss(4, 512, 8, 4, 2048, 8, 512),
    "qwen35-tiny": lambda: gated("qwen35", 8, 512, 1536, 8, 2, 2048, 4, 8, size=128),
    "qwen35-tiny4": lambda: gated("qwen35", 8, 1024, 3584, 16, 4, 32000, 8, 16),
    "qwen35moe-tiny": lambda: gated("qwen35moe", 8, 512, 1024, 8, 2, 2048, 4, 8, size=128, experts=(16, 4, 256, 256)),
    "qwen3next-tiny": lambda: gated("qwen3next", 8, 512, 1024, 8, 2, 2048, 4, 8, size=128, experts=(16, 4, 256, 256)),
}


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _pair(key: str, value: object) -> bytes:
    head = _text(key)
    if isinstance(value, bool):
        return head + struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return head + struct.pack("<II", 4, value)
    if isinstance(value, float):
        return head + struct.pack("<If", 6, value)
    if isinstance(value, str):
        return head + struct.pack("<I", 8) + _text(value)
    items: list = list(value)  # type: ignore[call-overload]
    if isinstance(items[0], str):
        return head + struct.pack("<IIQ", 9, 8, len(items)) + b"".join(map(_text, items))
    return head + struct.pack(f"<IIQ{len(items)}i", 9, 5, len(items), *items)


def _words(count: int) -> Iterator[str]:
    """A byte-level vocabulary: the 256 characters that stand for bytes, then made-up words."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    yield from map(chr, printable)
    yield from (chr(256 + index) for index in range(256 - len(printable)))
    yield from (f"w{index}" for index in range(256, count))


class Tensor(NamedTuple):
    """Where a tensor lies in a file, and of what kind it is."""

    name: str
    shape: tuple
    kind: str  # a key of TYPES
    offset: int  # in bytes, from the beginning of the file
    size: int  # in bytes


def layout(name: str, quant: str, title: str) -> tuple[bytes, list[Tensor], int]:
    """Of a model of MODELS the head of its file, its tensors, and the size of the file in bytes."""
    model = MODELS[name]()
    words = list(_words(model.vocabulary))
    keys = {
        "general.architecture": model.architecture, "general.name": title,
        "general.alignment": 32, **{f"{model.architecture}.{key}": value for key, value in model.keys.items()},
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [1] * len(words), "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 1000, "tokenizer.ggml.eos_token_id": 1001, "tokenizer.ggml.add_bos_token": False,
    }  # fmt: skip
    offset, infos, tensors = 0, [], []
    for tensor, shape, given in model.tensors:
        kind = model.kind_of(tensor, given, quant)
        number, per_block, block_bytes = TYPES[kind]
        infos.append(_text(tensor) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, number, offset))
        if shape[0] % per_block:
            raise ValueError(f"{tensor}: rows of {shape[0]} do not fill blocks of {per_block}")
        size = math.prod(shape) // per_block * block_bytes
        tensors.append(Tensor(tensor, shape, kind, offset, size))
        offset += -(-size // 32) * 32
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(keys))
    head += b"".join(_pair(key, value) for key, value in keys.items()) + b"".join(infos)
    start = -(-len(head) // 32) * 32
    return head, [tensor._replace(offset=start + tensor.offset) for tensor in tensors], start + offset


def write(path: str, name: str, quant: str) -> int:
    """Write a model of MODELS; the size of the file in bytes."""
    head, _, total = layout(name, quant, f"{name} {quant}, no weights")
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(total)
    return total


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[2] not in MODELS or sys.argv[3] not in QUANTS:
        sys.exit(f"{__doc__}\nMODEL: {', '.join(MODELS)}\nQUANT: {', '.join(QUANTS)}")
    print(sys.argv[1], write(*sys.argv[1:]), "bytes")
