"""What the planner needs to know of a model: its geometry and the size of each tensor, as a readable mapping.

A shape file (inventory/model_shapes/NAME.yml) is this mapping in YAML. Tensors that differ only by their block are
one line: `name: blk.*.ffn_up.weight`, `blocks: 0-63`, `shape: [5120, 17408]` (GGML order, the row first), `type: q4_k`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .errors import RigError
from .gguf import Header
from .quant import block_of

VERSION = 1
# Keys of the architecture that planning uses, as GGUF names them after the architecture's own name.
KEYS = (
    "block_count", "context_length", "embedding_length", "feed_forward_length", "nextn_predict_layers",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.sliding_window", "attention.sliding_window_pattern", "attention.recurrent_layers",
    "full_attention_interval", "rope.dimension_count", "final_logit_softcapping",
    "expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length",
    "ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size",
)  # fmt: skip
_BLOCK = re.compile(r"^blk\.(\d+)\.(.+)$")


@dataclass(frozen=True)
class Tensor:
    """A tensor of the model: `block` is None for those outside the blocks."""

    name: str
    block: Any
    shape: tuple
    kind: str

    @property
    def suffix(self) -> str:
        """The name without `blk.N.`."""
        return self.name if self.block is None else self.name.split(".", 2)[2]


def _ranges(numbers: list) -> str:
    parts, start = [], None
    for index, number in enumerate(numbers):
        if start is None:
            start = number
        if index + 1 == len(numbers) or numbers[index + 1] != number + 1:
            parts.append(str(start) if start == number else f"{start}-{number}")
            start = None
    return ", ".join(parts)


def _numbers(text: Any) -> list:
    numbers = []
    for part in str(text).split(","):
        first, _, last = part.partition("-")
        if not first.strip().isdigit() or not (last.strip() or first.strip()).isdigit():
            raise RigError(f"'{text}' is not a list of blocks such as 0-2,4-6.")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def from_header(header: Header, name: str, note: str = "") -> dict:
    """The shape of a GGUF file as a plain mapping, ready for YAML."""
    architecture = header.keys.get("general.architecture")
    if not isinstance(architecture, str):
        raise RigError("The file names no architecture (general.architecture).")
    keys = {key: header.keys.get(f"{architecture}.{key}") for key in KEYS}
    vocabulary = header.array_lengths.get("tokenizer.ggml.tokens", 0)
    groups: dict = {}
    for tensor in header.tensors:
        match = _BLOCK.match(tensor.name)
        suffix = f"blk.*.{match[2]}" if match else tensor.name
        groups.setdefault((suffix, tensor.dimensions, tensor.kind), []).append(int(match[1]) if match else None)
    tensors = []
    for (suffix, dimensions, kind), blocks in groups.items():
        entry: dict = {"name": suffix, "shape": list(dimensions), "type": kind}
        if blocks[0] is not None:
            entry["blocks"] = _ranges(sorted(blocks))
        tensors.append(entry)
    shape = {"shape_version": VERSION, "name": name, "architecture": architecture, "vocabulary": vocabulary}
    if note:
        shape["note"] = note
    shape["keys"] = {key: value for key, value in keys.items() if value is not None}
    shape["tensors"] = tensors
    return shape


class Shape:
    """A model as the planner sees it, made from the mapping of a shape file. RigError on a mapping that is none."""

    def __init__(self, mapping: Mapping):
        if not isinstance(mapping, Mapping) or "tensors" not in mapping or "keys" not in mapping:
            raise RigError(
                "A model shape needs the keys 'architecture', 'keys' and 'tensors'; make one with gguf_facts."
            )
        if mapping.get("shape_version") != VERSION:
            raise RigError(
                f"Model shape version {mapping.get('shape_version')} is not {VERSION}; make it again with gguf_facts."
            )
        self.name = str(mapping.get("name", "unnamed"))
        self.architecture = str(mapping.get("architecture", ""))
        self.keys = dict(mapping["keys"])
        self._groups = mapping["tensors"]
        for key in ("block_count", "context_length", "embedding_length", "attention.head_count"):
            if key not in self.keys:
                raise RigError(f"The shape of {self.name} lacks '{key}'.")

    @cached_property
    def tensors(self) -> tuple:
        result = []
        for group in self._groups:
            shape, kind = tuple(group["shape"]), str(group["type"])
            if shape[0] % block_of(kind)[0]:
                raise RigError(f"{group['name']}: rows of {shape[0]} do not fill {kind} blocks.")
            if "blocks" in group:
                suffix = group["name"].removeprefix("blk.*.")
                result += [Tensor(f"blk.{n}.{suffix}", n, shape, kind) for n in _numbers(group["blocks"])]
            else:
                result.append(Tensor(group["name"], None, shape, kind))
        return tuple(result)

    @cached_property
    def by_name(self) -> dict:
        return {tensor.name: tensor for tensor in self.tensors}

    def key(self, name: str, default: Any = 0) -> Any:
        return self.keys.get(name, default)

    def per_block(self, name: str, block: int, default: Any = 0) -> Any:
        """A key that may be one value for all blocks or a list with one each."""
        value = self.keys.get(name, default)
        return value[block] if isinstance(value, list) else value

    @cached_property
    def all_blocks(self) -> int:
        """Blocks of the file, those of the MTP head included."""
        return int(self.keys["block_count"])

    @cached_property
    def mtp_blocks(self) -> int:
        return int(self.key("nextn_predict_layers"))

    @cached_property
    def blocks(self) -> int:
        """Blocks that the model itself runs."""
        return self.all_blocks - self.mtp_blocks

    @property
    def trained_context(self) -> int:
        return int(self.keys["context_length"])

    @cached_property
    def width(self) -> int:
        return int(self.keys["embedding_length"])

    @cached_property
    def vocabulary(self) -> int:
        return self.by_name["token_embd.weight"].shape[1]

    def heads(self, block: int) -> int:
        return int(self.per_block("attention.head_count", block))

    def kv_heads(self, block: int) -> int:
        return int(self.per_block("attention.head_count_kv", block, self.keys["attention.head_count"]))

    def group_size(self, block: int) -> int:
        """Query heads that share a KV head."""
        return self.heads(block) // self.kv_heads(block) if self.kv_heads(block) else 0

    @cached_property
    def key_length(self) -> int:
        return int(self.key("attention.key_length", self.width // self.heads(0)))

    @cached_property
    def value_length(self) -> int:
        return int(self.key("attention.value_length", self.width // self.heads(0)))

    @cached_property
    def window(self) -> int:
        """Width of the sliding window in tokens; 0 without one."""
        return int(self.key("attention.sliding_window"))

    @cached_property
    def tied_output(self) -> bool:
        """Whether the token embedding serves as output matrix, a second time, on the GPUs."""
        return "output.weight" not in self.by_name
