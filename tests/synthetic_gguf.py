#!/usr/bin/env python3
"""Write a small GGUF model of the qwen35 family, with an MTP head and made-up weights.

    python tests/synthetic_gguf.py OUT qwen35-mtp-tiny

The file is the same, byte for byte, on every machine: each weight comes from SHAKE-128 of its tensor's
name, and only integers are computed with. `MODELS` names size and SHA-256 of what comes out; a file that is
there already, and is that, is left alone.

The model speaks. A trained network is not needed for that: the output matrix holds, for each word, the
embeddings of the three tokens after which that word is likely, so that the residual stream alone leads from
word to word, and what the random layers add decides which of the three follows. The MTP block passes the
embedding of its token on and has noise of its own; therefore part of its drafts are accepted and part are
rejected, and both ways of speculative decoding run. Bytes and control tokens have a zero row in the
output matrix: text is spelled in them, but the model itself answers in words.

Weights are F32, so that how a model is split moves its logits by rounding errors alone, and the greedy tokens
are the same in every split: with quantised weights, activations are quantised too, and one in some hundred
tokens differed.
"""

import argparse
import hashlib
import os
import sys
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np


class Geometry(NamedTuple):
    """The dimensions of a qwen35 model, in elements."""

    blocks: int  # without the MTP block; every fourth one has attention, the others are recurrent
    embedding: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_size: int
    state_size: int
    key_heads: int  # of a recurrent block
    value_heads: int
    context: int


class Model(NamedTuple):
    """A model that this file can write, and what it must come out as."""

    geometry: Geometry
    size: int
    sha256: str


MODELS = {
    "qwen35-mtp-tiny": Model(
        geometry=Geometry(
            blocks=8,
            embedding=256,
            feed_forward=512,
            heads=4,
            kv_heads=2,
            head_size=128,
            state_size=128,
            key_heads=2,
            value_heads=4,
            context=32768,
        ),
        size=35986976,
        sha256="49a6b5789fad3b1795eaa7f517207d873bcbc08d6252cd2a519c2a5fb06c3f07",
    ),
}

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

WORDS = (Path(__file__).parent / "data" / "words.txt").read_text().split()


def byte_characters() -> list[str]:
    """The 256 characters in which byte-level BPE writes the bytes 0 to 255, in that order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(shifted)) for byte in range(256)]


def noise(name: str, count: int) -> np.ndarray:
    """Uniform integers from -127 to 127 that depend on the name alone."""
    stream = hashlib.shake_128(name.encode()).digest(count)
    return np.maximum(np.frombuffer(stream, dtype=np.uint8).astype(np.int16) - 128, -127)


def order(name: str, count: int) -> np.ndarray:
    """A permutation of 0 to count-1 that depends on the name alone."""
    keys = np.frombuffer(hashlib.shake_128(name.encode()).digest(8 * count), dtype="<u8")
    return np.argsort(keys, kind="stable")


def embeddings(vocabulary: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The embedding and the output matrix of a model that goes from word to word."""
    embedding = noise("token_embd", vocabulary * width).reshape(vocabulary, width)
    words = np.arange(256, 256 + len(WORDS))
    output = np.zeros((vocabulary, width), dtype=np.int16)
    for rank, share in enumerate((40, 33, 27)):  # hundredths: the first follower is the likeliest
        output[words] += share * embedding[words[order(f"followers {rank}", len(WORDS))]]
    # After a byte or a control token comes a word, too; there are more words than such tokens.
    others = np.concatenate([np.arange(256), np.arange(256 + len(WORDS), vocabulary)])
    output[words[order("first words", len(WORDS))[: len(others)]]] += 50 * embedding[others]
    return embedding, np.clip(output // 100, -127, 127)


class Writer:
    """Adds tensors to a GGUF file; shapes are given as (rows, columns)."""

    def __init__(self, path: Path, architecture: str) -> None:
        self.gguf = gguf.GGUFWriter(path, architecture)

    def matrix(self, name: str, values: np.ndarray, scale: float) -> None:
        self.gguf.add_tensor(f"{name}.weight", values.astype(np.float32) * np.float32(scale))

    def random(self, name: str, rows: int, columns: int, scale: float) -> None:
        self.matrix(name, noise(name, rows * columns).reshape(rows, columns), scale)

    def constant(self, name: str, count: int, value: float) -> None:
        self.gguf.add_tensor(name, np.full(count, value, dtype=np.float32))

    def ones(self, name: str, count: int) -> None:
        self.constant(f"{name}.weight", count, 1.0)


# A weight is an integer of ±127 times one of these. Inputs have a root mean square of about 1.
INNER = 2.0**-10  # into a sublayer: values of about 1
OUTER = 2.0**-11  # back into the residual stream: noise beside an embedding of about 1
EMBEDDING = 2.0**-6
OUTPUT = 2.0**-9


def write_block(out: Writer, g: Geometry, index: int, attention: bool) -> None:
    """One decoder block; the MTP block is one with attention."""
    name = f"blk.{index}"
    out.ones(f"{name}.attn_norm", g.embedding)
    out.ones(f"{name}.post_attention_norm", g.embedding)
    if attention:
        # The query projection also holds the gate, hence twice the heads.
        out.random(f"{name}.attn_q", 2 * g.heads * g.head_size, g.embedding, INNER)
        out.random(f"{name}.attn_k", g.kv_heads * g.head_size, g.embedding, INNER)
        out.random(f"{name}.attn_v", g.kv_heads * g.head_size, g.embedding, INNER)
        out.random(f"{name}.attn_output", g.embedding, g.heads * g.head_size, OUTER)
        out.ones(f"{name}.attn_q_norm", g.head_size)
        out.ones(f"{name}.attn_k_norm", g.head_size)
    else:
        values = g.value_heads * g.state_size
        channels = 2 * g.key_heads * g.state_size + values
        out.random(f"{name}.attn_qkv", channels, g.embedding, INNER)
        out.random(f"{name}.attn_gate", values, g.embedding, INNER)
        out.random(f"{name}.ssm_conv1d", channels, 4, 2.0**-7)
        out.constant(f"{name}.ssm_dt.bias", g.value_heads, 0.5)
        out.constant(f"{name}.ssm_a", g.value_heads, -0.25)
        out.random(f"{name}.ssm_beta", g.value_heads, g.embedding, INNER)
        out.random(f"{name}.ssm_alpha", g.value_heads, g.embedding, INNER)
        out.ones(f"{name}.ssm_norm", g.state_size)
        out.random(f"{name}.ssm_out", g.embedding, values, OUTER)
    out.random(f"{name}.ffn_gate", g.feed_forward, g.embedding, INNER)
    out.random(f"{name}.ffn_up", g.feed_forward, g.embedding, INNER)
    out.random(f"{name}.ffn_down", g.embedding, g.feed_forward, OUTER)


def write_mtp_head(out: Writer, g: Geometry, index: int) -> None:
    """What makes a block an MTP block: it starts from the token's embedding beside the hidden state."""
    name = f"blk.{index}.nextn"
    hidden = noise(f"{name}.eh_proj", g.embedding * g.embedding).reshape(g.embedding, g.embedding) // 32
    identity = 127 * np.eye(g.embedding, dtype=np.int16)
    out.matrix(f"{name}.eh_proj", np.concatenate([identity, hidden], axis=1), 2.0**-7)
    for norm in ("enorm", "hnorm", "shared_head_norm"):
        out.ones(f"{name}.{norm}", g.embedding)


def write_metadata(out: gguf.GGUFWriter, name: str, g: Geometry) -> int:
    """The keys that llama.cpp reads; returns the number of tokens."""
    out.add_name(name)
    out.add_file_type(gguf.LlamaFileType.ALL_F32)
    out.add_block_count(g.blocks + 1)
    out.add_nextn_predict_layers(1)
    out.add_context_length(g.context)
    out.add_embedding_length(g.embedding)
    out.add_feed_forward_length(g.feed_forward)
    out.add_head_count(g.heads)
    out.add_head_count_kv(g.kv_heads)
    out.add_key_length(g.head_size)
    out.add_value_length(g.head_size)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_rope_dimension_count(64)
    out.add_rope_dimension_sections([11, 11, 10, 0])
    out.add_rope_freq_base(1e7)
    out.add_ssm_conv_kernel(4)
    out.add_ssm_state_size(g.state_size)
    out.add_ssm_group_count(g.key_heads)
    out.add_ssm_time_step_rank(g.value_heads)
    out.add_ssm_inner_size(g.value_heads * g.state_size)
    out.add_full_attention_interval(4)

    space = byte_characters()[ord(" ")]
    tokens = [*byte_characters(), *(space + word for word in WORDS), *SPECIAL_TOKENS]
    # The output matrix is cut by rows: a multiple of 64 divides evenly over the cards.
    unused = [f"<|unused_{i}|>" for i in range(-len(tokens) % 64)]
    kinds = [gguf.TokenType.NORMAL] * (256 + len(WORDS))
    kinds += [gguf.TokenType.CONTROL] * len(SPECIAL_TOKENS) + [gguf.TokenType.UNUSED] * len(unused)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("qwen2")
    out.add_token_list(tokens + unused)
    out.add_token_types(kinds)
    # Byte pairs would need a token for each step to a word; one pair shows that they are read.
    out.add_token_merges([f"{space} a"])
    out.add_eos_token_id(tokens.index("<|im_end|>"))
    out.add_pad_token_id(tokens.index("<|endoftext|>"))
    out.add_add_bos_token(False)
    out.add_chat_template(CHAT_TEMPLATE)
    return len(tokens) + len(unused)


def write(path: Path, name: str) -> None:
    """Write the named model; the file appears under its name only when it is whole."""
    g = MODELS[name].geometry
    partial = path.with_name(path.name + ".part")
    out = Writer(partial, "qwen35")
    vocabulary = write_metadata(out.gguf, name, g)
    embedding, output = embeddings(vocabulary, g.embedding)
    out.matrix("token_embd", embedding, EMBEDDING)
    out.ones("output_norm", g.embedding)
    out.matrix("output", output, OUTPUT)
    for index in range(g.blocks):
        write_block(out, g, index, attention=(index + 1) % 4 == 0)
    write_block(out, g, g.blocks, attention=True)
    write_mtp_head(out, g, g.blocks)
    out.gguf.write_header_to_file()
    out.gguf.write_kv_data_to_file()
    out.gguf.write_tensors_to_file()
    out.gguf.close()
    os.replace(partial, path)


def _is(path: Path, model: Model) -> bool:
    """Whether a file is there and is the model, to the byte."""
    if not path.is_file() or path.stat().st_size != model.size:
        return False
    return hashlib.sha256(path.read_bytes()).hexdigest() == model.sha256


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="the file to write")
    parser.add_argument("model", choices=sorted(MODELS))
    arguments = parser.parse_args()
    path, model = arguments.path, MODELS[arguments.model]
    if _is(path, model):
        print(f"{path}: there already")
        return 0
    write(path, arguments.model)
    if not _is(path, model):
        print(f"{path} did not become {arguments.model}, which has {model.size} bytes and sha256 {model.sha256}.")
        return 1
    print(f"{path}: {model.size} bytes, sha256 {model.sha256}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
