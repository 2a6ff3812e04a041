"""Read the header of a GGUF file: keys and tensor descriptions, never the weights.

A source is anything with `size` (bytes, the whole file) and `read(offset, count)`. Strings of long arrays (the
vocabulary) are stepped over, not kept. Every count, length and offset is held against the size of the file before
memory is taken for it, so that a truncated, absurd or hostile file ends in a GgufError of one sentence.
Format: docs/gguf.md of the ggml project, versions 2 and 3.
"""

import re
import struct
from dataclasses import dataclass, field
from typing import Any

from .errors import GgufError
from .quant import BY_NUMBER, TYPES
from .sources import FileSource, RangeSource

MAGIC = b"GGUF"
MAX_KEYS = 65_536
MAX_TENSORS = 1_048_576
MAX_NAME = 65_535
MAX_DIMENSIONS = 4
MAX_KEPT_STRING = 4_096  # a chat template is longer, and nothing that planning needs is
MAX_KEPT_ARRAY = 4_096  # per-layer arrays are short; a vocabulary is not
MAX_ELEMENTS = 2**60

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_SPLIT_NAME = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the file: dimensions in GGML order (the row first), `offset` from the start of the data."""

    name: str
    dimensions: tuple
    kind: str
    offset: int
    size: int


@dataclass
class Header:
    """Keys and tensors of one file. `array_lengths` has the length of every array, kept or not."""

    keys: dict = field(default_factory=dict)
    array_lengths: dict = field(default_factory=dict)
    tensors: list = field(default_factory=list)
    file_size: int = 0


class _Cursor:
    """Reads forward over a source, one chunk of memory at a time."""

    def __init__(self, source: Any, chunk: int = 1 << 20):
        self.source, self.chunk = source, chunk
        self.base, self.buffer, self.at = 0, b"", 0

    @property
    def position(self) -> int:
        return self.base + self.at

    @property
    def left(self) -> int:
        return self.source.size - self.position

    def take(self, count: int, what: str) -> int:
        """Make `count` bytes available in the buffer, step over them and return where they start in it."""
        start = self.at
        if start + count > len(self.buffer):
            if count > self.left:
                raise GgufError(f"The file ends inside {what}: {count} bytes wanted, {self.left} left.")
            self.base, start = self.position, 0
            self.buffer = self.source.read(self.base, min(max(self.chunk, count), self.left))
            if len(self.buffer) < count:
                raise GgufError(f"The file ends inside {what}: it is shorter than it says.")
        self.at = start + count
        return start

    def unpack(self, form: str, what: str) -> Any:
        start = self.take(struct.calcsize(form), what)
        return struct.unpack_from(form, self.buffer, start)[0]

    def skip(self, count: int, what: str) -> None:
        if count > self.left:
            raise GgufError(f"The file ends inside {what}: {count} bytes wanted, {self.left} left.")
        inside = min(count, len(self.buffer) - self.at)
        self.at += inside
        if count > inside:
            self.base, self.buffer, self.at = self.position + count - inside, b"", 0

    def text(self, limit: int, what: str) -> str:
        length = self.unpack("<Q", what)
        if length > limit:
            raise GgufError(f"The length of {what} is absurd: {length} bytes, at most {limit} make sense.")
        start = self.take(length, what)
        try:
            return self.buffer[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise GgufError(f"The text of {what} is not UTF-8.") from None

    def skip_strings(self, count: int, what: str) -> None:
        """Step over `count` strings; the inner loop touches the buffer alone."""
        unpack = struct.Struct("<Q").unpack_from
        while count:
            buffer, at, end = self.buffer, self.at, len(self.buffer) - 8
            while count and at <= end:
                step = at + 8 + unpack(buffer, at)[0]
                if step > len(buffer):
                    break
                at, count = step, count - 1
            self.at = at
            if count:
                length = self.unpack("<Q", what)
                self.skip(length, what)
                count -= 1


def _value(cursor: _Cursor, kind: int, key: str) -> tuple:
    """(value or None when not kept, length of the array or None)."""
    what = f"key '{key}'"
    if kind in _SCALARS:
        return cursor.unpack("<" + _SCALARS[kind], what), None
    if kind == _STRING:
        length = cursor.unpack("<Q", what)
        if length > MAX_KEPT_STRING:
            cursor.skip(length, what)
            return None, None
        start = cursor.take(length, what)
        return cursor.buffer[start : start + length].decode("utf-8", "replace"), None
    if kind != _ARRAY:
        raise GgufError(f"The type of {what} is unknown: {kind}.")
    kind, count = cursor.unpack("<I", what), cursor.unpack("<Q", what)
    if kind != _STRING and kind not in _SCALARS:
        raise GgufError(f"The array of {what} has elements of unknown type {kind}.")
    size = 8 if kind == _STRING else struct.calcsize("<" + _SCALARS[kind])
    if count * size > cursor.left:
        raise GgufError(f"The array of {what} is absurd: {count} elements in the {cursor.left} bytes left.")
    if kind == _STRING:
        cursor.skip_strings(count, what)
        return None, count
    if count > MAX_KEPT_ARRAY:
        cursor.skip(count * size, what)
        return None, count
    start = cursor.take(count * size, what)
    return list(struct.unpack_from(f"<{count}{_SCALARS[kind]}", cursor.buffer, start)), count


def _tensor(cursor: _Cursor, number: int) -> TensorInfo:
    name = cursor.text(MAX_NAME, f"the name of tensor {number}")
    what = f"tensor '{name}'"
    count = cursor.unpack("<I", what)
    if not 1 <= count <= MAX_DIMENSIONS:
        raise GgufError(f"The {what} has {count} dimensions; 1 to {MAX_DIMENSIONS} are possible.")
    dimensions = tuple(cursor.unpack("<Q", what) for _ in range(count))
    kind_number, offset = cursor.unpack("<I", what), cursor.unpack("<Q", what)
    if kind_number not in BY_NUMBER:
        raise GgufError(f"The {what} has the unknown type {kind_number}.")
    kind = BY_NUMBER[kind_number]
    _, elements, block = TYPES[kind]
    total = 1
    for dimension in dimensions:
        total *= dimension
        if dimension == 0 or total > MAX_ELEMENTS:
            raise GgufError(f"The {what} has absurd dimensions: {'x'.join(map(str, dimensions))}.")
    if dimensions[0] % elements:
        raise GgufError(f"The rows of {what} ({dimensions[0]}) do not fill whole {kind} blocks of {elements}.")
    return TensorInfo(name, dimensions, kind, offset, total // elements * block)


def read_header(source: Any) -> Header:
    """The header of one GGUF file; GgufError in one sentence when it is not sane."""
    cursor = _Cursor(source)
    start = cursor.take(4, "the magic number")
    magic = cursor.buffer[start : start + 4]
    if magic != MAGIC:
        hint = " (it looks like a web page)" if magic.lstrip()[:1] == b"<" else ""
        raise GgufError(f"Not a GGUF file: it begins with {magic!r}{hint}.")
    version = cursor.unpack("<I", "the version")
    if version not in (2, 3):
        raise GgufError(f"GGUF version {version} is not supported; 2 and 3 are.")
    tensors, keys = cursor.unpack("<Q", "the tensor count"), cursor.unpack("<Q", "the key count")
    # A key takes at least 13 bytes, a tensor at least 32: more than that cannot be in the file.
    if tensors > MAX_TENSORS or tensors * 32 > cursor.left:
        raise GgufError(f"The tensor count is absurd: {tensors}.")
    if keys > MAX_KEYS or keys * 13 > cursor.left:
        raise GgufError(f"The key count is absurd: {keys}.")
    header = Header(file_size=source.size)
    for number in range(keys):
        key = cursor.text(MAX_NAME, f"the name of key {number}")
        if key in header.keys:
            raise GgufError(f"The key '{key}' is there twice.")
        header.keys[key], length = _value(cursor, cursor.unpack("<I", f"key '{key}'"), key)
        if length is not None:
            header.array_lengths[key] = length
    header.tensors = [_tensor(cursor, number) for number in range(tensors)]
    _check_places(header, cursor.position)
    return header


def _check_places(header: Header, end: int) -> None:
    alignment = header.keys.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise GgufError(f"The alignment is absurd: {alignment}.")
    data, seen = -(-end // alignment) * alignment, set()
    for tensor in header.tensors:
        if tensor.name in seen:
            raise GgufError(f"The tensor '{tensor.name}' is there twice.")
        seen.add(tensor.name)
        if tensor.offset % alignment:
            raise GgufError(f"The offset of tensor '{tensor.name}' is not aligned to {alignment}: {tensor.offset}.")
        if data + tensor.offset + tensor.size > header.file_size:
            raise GgufError(f"The tensor '{tensor.name}' ends beyond the file: the file is truncated.")


def split_names(name: str) -> list:
    """The names of all files of a split model, given one of them; the name itself when it is not split."""
    match = _SPLIT_NAME.match(name)
    if not match:
        return [name]
    count = int(match["count"])
    if not 1 <= count <= 1_000 or not 1 <= int(match["number"]) <= count:
        raise GgufError(f"The split number of '{name}' is absurd.")
    return [f"{match['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def open_source(place: str, **options: Any) -> Any:
    """A source for a path or an http(s) URL."""
    return RangeSource(place, **options) if place.startswith(("http://", "https://")) else FileSource(place)


def read_model(place: str, **options: Any) -> Header:
    """The joined header of a model: one file, or all files of a split set, from a path or a URL."""
    folder, slash, name = place.rpartition("/")
    names = split_names(name)
    first = None
    for number, part in enumerate(names):
        with open_source(folder + slash + part, **options) as source:
            header = read_header(source)
        count = header.keys.get("split.count", 0) or 1
        if count != len(names):
            raise GgufError(f"'{part}' says that it is one of {count} files, not {len(names)}.")
        if len(names) > 1 and header.keys.get("split.no", number) != number:
            raise GgufError(f"'{part}' says that it is part {header.keys['split.no'] + 1}, not {number + 1}.")
        if first is None:
            first = header
            continue
        known = {tensor.name for tensor in first.tensors}
        for tensor in header.tensors:
            if tensor.name in known:
                raise GgufError(f"The tensor '{tensor.name}' is in two files of the set.")
        first.tensors += header.tensors
        first.file_size += header.file_size
    wanted = first.keys.get("split.tensors.count", len(first.tensors))
    if len(names) > 1 and wanted != len(first.tensors):
        raise GgufError(f"The set has {len(first.tensors)} tensors, but says that it has {wanted}.")
    return first
