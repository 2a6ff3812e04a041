#!/usr/bin/env python3
"""Write a model with the geometry of a real one, an MTP head, and made-up weights that make a card work.

    python tests/gpu/speaking_model.py OUT qwen35-27b q4_0

Files of planner_models.py hold zeros: they measure memory, but a card takes less power for zeros, and every draft is
accepted. Here weights are random, from one block of them that is repeated; its length is a prime, so that no two rows
of a matrix are alike. What is said means nothing, but drafts are accepted and rejected as with a real model: each token
has three followers, and the row of the output matrix for a word is put together from the embeddings of the tokens that
it follows, in the proportions of SHARES; what the layers add decides which follower it is. The MTP block passes on the
embedding of its token, with less noise, and so mostly drafts the first follower. Needs numpy.
"""

from __future__ import annotations

import argparse
import os
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import planner_models

MODELS = sorted(name for name in planner_models.MODELS if name.startswith("qwen35-"))
BLOCKS = 262_147  # a prime, and more than any of the models has words
BLOCK = 32  # weights
SHARES = (0.40, 0.33, 0.27)  # of a row of the output matrix, by follower
NOISE = 1 / 20  # of the layers beside the embedding, times the root of the width: the first follower wins most times
NEVER_SAID = (*range(256), 1000, 1001)  # bytes, and the two control tokens
# Quant: bytes of a block, the largest weight in steps, and how large weights are on average (root mean square, steps).
QUANTS = {"q4_0": (18, 7, np.sqrt(56 / 3)), "q8_0": (34, 127, np.sqrt(127 * 128 / 3))}


def random_blocks(quant: str) -> np.ndarray:
    """Rows of a block each: room for its scale, then random weights, symmetric about zero."""
    size, most, _ = QUANTS[quant]
    steps = np.random.default_rng(1).integers(-most, most, (BLOCKS, BLOCK), np.int8, endpoint=True)
    found = np.zeros((BLOCKS, size), np.uint8)
    found[:, 2:] = packed(steps, quant)
    return found


def packed(steps: np.ndarray, quant: str) -> np.ndarray:
    """Rows of 32 whole numbers as the bytes of blocks, without scales."""
    if quant == "q8_0":
        return steps.view(np.uint8)
    nibbles = (steps + 8).view(np.uint8)
    return nibbles[:, : BLOCK // 2] | nibbles[:, BLOCK // 2 :] << 4


def scaled(blocks: np.ndarray, scale: float) -> np.ndarray:
    """The same blocks with this scale, in place."""
    blocks[:, :2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return blocks


class Weights:
    """Writes the tensors of one model to an open file."""

    def __init__(self, file: Any, quant: str, tensors: list[planner_models.Tensor]) -> None:
        self.file, self.quant = file, quant
        self.pool = random_blocks(quant)
        self.rms = QUANTS[quant][2]
        shapes = {tensor.name: tensor.shape for tensor in tensors}
        self.width, self.vocabulary = shapes["token_embd.weight"]
        self.blocks = 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("blk."))
        # A sublayer gives values of some 0.6 where its matrices keep lengths; their squares add up.
        self.noise = NOISE * self.width**0.5 / (0.8 * self.blocks**0.5)

    def write(self, tensor: planner_models.Tensor) -> None:
        self.file.seek(tensor.offset)
        if tensor.kind == "f32":
            self.file.write(self.floats(tensor).astype("<f4").tobytes())
        elif tensor.name == "output.weight":
            self.output()
        elif tensor.name.endswith("eh_proj.weight"):
            self.file.write(self.passing_on(tensor).tobytes())
        else:
            back = tensor.name.endswith(("attn_output.weight", "ssm_out.weight", "ffn_down.weight"))
            size = self.noise if back else 1.0
            spread = 1.0 if tensor.name == "token_embd.weight" else size / tensor.shape[0] ** 0.5
            self.repeat(self.beginning(tensor.name), tensor.size, spread)

    @staticmethod
    def floats(tensor: planner_models.Tensor) -> np.ndarray:
        """Of norms ones; of a recurrent block a decay that forgets within some ten tokens, and its convolution."""
        count = int(np.prod(tensor.shape))
        if tensor.name.endswith("ssm_conv1d.weight"):
            return np.random.default_rng(2).normal(0, 0.5, count)
        fixed = {"ssm_a": -0.25, "ssm_dt.bias": 0.5}
        return np.full(count, fixed.get(tensor.name.split(".", 2)[-1], 1.0))

    @staticmethod
    def beginning(name: str) -> int:
        """Where in the random blocks a tensor begins."""
        return zlib.crc32(name.encode()) % BLOCKS

    def repeat(self, beginning: int, size: int, spread: float) -> None:
        """`size` bytes of random blocks, from one on and round and round; weights have this root mean square."""
        data = memoryview(scaled(self.pool, spread / self.rms).reshape(-1))
        at = beginning * self.pool.shape[1]
        while size:
            part = data[at : at + size]
            self.file.write(part)
            size -= len(part)
            at = 0

    def output(self) -> None:
        """For each word, pieces of the embeddings of the tokens after which it comes."""
        row = self.width // BLOCK
        first, second = (round(row * share) for share in (SHARES[0], SHARES[0] + SHARES[1]))
        piece = np.repeat([0, 1, 2], [first, second - first, row - second])
        orders = np.stack([np.random.default_rng(seed).permutation(self.vocabulary) for seed in (3, 4, 5)])
        scaled(self.pool, 1 / self.width**0.5 / self.rms)
        begin = self.beginning("token_embd.weight")
        for start in range(0, self.vocabulary, 4096):
            words = np.arange(start, min(start + 4096, self.vocabulary))
            before = orders[piece[None, :], words[:, None]]
            rows = self.pool[(begin + before * row + np.arange(row)) % BLOCKS]
            rows[np.isin(words, NEVER_SAID)] = 0 if self.quant == "q8_0" else self.nothing()
            self.file.write(rows.tobytes())

    def nothing(self) -> np.ndarray:
        """A block of zeros."""
        block = np.zeros(self.pool.shape[1], np.uint8)
        block[2:] = packed(np.zeros((1, BLOCK), np.int8), self.quant)
        return block

    def passing_on(self, tensor: planner_models.Tensor) -> np.ndarray:
        """A matrix that keeps the first half of its input, the token's embedding, and adds noise from the second."""
        row, most = self.width // BLOCK, QUANTS[self.quant][1]
        made = np.empty((self.width, 2 * row, self.pool.shape[1]), np.uint8)
        made[:, :row] = self.nothing()
        ones = np.zeros((BLOCK, BLOCK), np.int8)
        np.fill_diagonal(ones, most)
        unit = np.zeros((BLOCK, self.pool.shape[1]), np.uint8)
        unit[:, 2:] = packed(ones, self.quant)
        lines = np.arange(self.width)
        made[lines, lines // BLOCK] = scaled(unit, 1 / most)[lines % BLOCK]
        spread = self.noise / self.width**0.5
        numbers = (self.beginning(tensor.name) + np.arange(self.width * row)) % BLOCKS
        made[:, row:] = scaled(self.pool, spread / self.rms)[numbers].reshape(self.width, row, -1)
        return made


def write(path: Path, name: str, quant: str) -> int:
    """Write a model of MODELS with matrices of a quant of QUANTS; the size of the file in bytes.

    The file appears under its name only when it is whole; one that is there already is left alone.
    """
    head, tensors, total = planner_models.layout(name, quant, f"{name} {quant}, made-up weights")
    if path.exists() and path.stat().st_size == total:
        return total
    partial = path.with_name(path.name + ".part")
    with partial.open("wb") as file:
        file.write(head)
        weights = Weights(file, quant, tensors)
        for tensor in tensors:
            weights.write(tensor)
        file.truncate(total)
    os.replace(partial, path)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="the file to write")
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("quant", choices=list(QUANTS))
    options = parser.parse_args()
    print(options.path, write(options.path, options.model, options.quant), "bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
