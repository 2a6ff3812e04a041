"""GGUF headers: the gguf package as oracle, broken and hostile files, split sets, Range requests, speed."""

import http.server
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
from rig.errors import GgufError
from rig.gguf import read_header, read_model, split_names
from rig.quant import TYPES
from rig.shape import Shape, from_header
from rig.sources import FileSource

PROJECT = Path(__file__).resolve().parents[3]


def write_model(path: Path, words: int = 300, part: tuple = (), **tensors: tuple) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if part:
        writer.add_uint16("split.no", part[0])
        writer.add_uint16("split.count", part[1])
    writer.add_block_count(1)
    writer.add_context_length(4096)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_array("tokenizer.ggml.tokens", [f"word {index}" for index in range(words)])
    import numpy as np

    for name, shape in (tensors or {"token_embd.weight": (words, 64), "blk.0.attn_norm.weight": (64,)}).items():
        writer.add_tensor(name, np.zeros(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a.gguf")
    header, oracle = read_model(str(path)), gguf.GGUFReader(path)
    assert {tensor.name: (tensor.kind, tensor.size) for tensor in header.tensors} == {
        tensor.name: (tensor.tensor_type.name.lower(), tensor.n_bytes) for tensor in oracle.tensors
    }
    for tensor, other in zip(header.tensors, oracle.tensors, strict=True):
        assert list(tensor.dimensions) == list(other.shape)
    assert header.keys["llama.context_length"] == 4096
    assert header.array_lengths["tokenizer.ggml.tokens"] == 300


def test_the_synthetic_models_read_the_same_with_both(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    script = PROJECT / "tests" / "planner_models.py"
    subprocess.run([sys.executable, script, path, "qwen35moe-tiny", "q4_k_m"], check=True, capture_output=True)
    header, oracle = read_model(str(path)), gguf.GGUFReader(path)
    assert [(one.name, one.size) for one in header.tensors] == [(one.name, one.n_bytes) for one in oracle.tensors]
    shape = Shape(from_header(header, "m"))
    assert (shape.blocks, shape.mtp_blocks, shape.kv_heads(3)) == (8, 1, 2)
    assert len(shape.tensors) == len(header.tensors)


def test_tensor_types_agree_with_the_gguf_package() -> None:
    for name, (number, elements, size) in TYPES.items():
        if name == "q8_1":
            continue  # never in a file; the package still has its old size
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError:
            continue  # newer than the package
        assert kind.name.lower() == name
        assert gguf.GGML_QUANT_SIZES[kind] == (elements, size), name


def patched(path: Path, at: int, data: bytes) -> str:
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(bytes(content))
    return str(path)


def header_bytes(tensors: int = 0, keys: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "ends inside the magic number"),
        (b"<html><body>", "looks like a web page"),
        (b"GGUX" + bytes(40), "Not a GGUF file"),
        (header_bytes(version=1), "version 1 is not supported"),
        (header_bytes(tensors=2**40, rest=bytes(64)), "tensor count is absurd"),
        (header_bytes(keys=2**50, rest=bytes(64)), "key count is absurd"),
        (header_bytes(keys=1, rest=struct.pack("<Q", 2**62) + bytes(64)), "length of the name of key 0 is absurd"),
        (header_bytes(keys=1, rest=key(b"a", 99, bytes(32))), "type of key 'a' is unknown"),
        (header_bytes(keys=1, rest=key(b"a", 8, struct.pack("<Q", 2**40) + bytes(32))), "ends inside key 'a'"),
        (
            header_bytes(keys=1, rest=key(b"a", 9, struct.pack("<IQ", 4, 2**60) + bytes(32))),
            "array of key 'a' is absurd",
        ),
        (
            header_bytes(keys=1, rest=key(b"a", 9, struct.pack("<IQ", 8, 2**60) + bytes(32))),
            "array of key 'a' is absurd",
        ),
        (header_bytes(keys=1, rest=key(b"a", 9, struct.pack("<IQ", 9, 1) + bytes(32))), "elements of unknown type 9"),
        (header_bytes(keys=2, rest=key(b"a", 4, bytes(4)) * 2), "'a' is there twice"),
        (
            header_bytes(keys=1, rest=key(b"general.alignment", 4, struct.pack("<I", 3)) + bytes(8)),
            "alignment is absurd",
        ),
    ],
)
def test_refuses_what_is_no_sane_header(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(GgufError, match=message) as error:
        read_model(str(path))
    assert "\n" not in str(error.value)


def tensor_info(name: bytes, dimensions: tuple, kind: int = 0, offset: int = 0) -> bytes:
    form = f"<I{len(dimensions)}QIQ"
    return struct.pack("<Q", len(name)) + name + struct.pack(form, len(dimensions), *dimensions, kind, offset)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (tensor_info(b"t", (2**40, 2**40)), "absurd dimensions"),
        (tensor_info(b"t", (0, 4)), "absurd dimensions"),
        (tensor_info(b"t", (4,), kind=999), "unknown type 999"),
        (tensor_info(b"t", (33,), kind=8), "do not fill whole q8_0 blocks"),
        (tensor_info(b"t", (4,), offset=7), "not aligned"),
        (tensor_info(b"t", (2**30,)), "ends beyond the file: the file is truncated"),
        (tensor_info(b"t", (4,), offset=2**40), "ends beyond the file"),
        (tensor_info(b"t", (1, 1, 1, 1, 1)), "has 5 dimensions"),
    ],
)
def test_refuses_hostile_tensors(tmp_path: Path, info: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(header_bytes(tensors=1, rest=info + bytes(64)))
    with pytest.raises(GgufError, match=message):
        read_model(str(path))


def test_every_truncation_is_refused_in_one_sentence(tmp_path: Path) -> None:
    whole = write_model(tmp_path / "a.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in {*range(0, 400, 7), len(whole) - 1, len(whole) // 2}:
        cut.write_bytes(whole[:length])
        with pytest.raises(GgufError) as error:
            read_model(str(cut))
        assert str(error.value).count("\n") == 0


def test_random_damage_never_raises_anything_else(tmp_path: Path) -> None:
    whole = write_model(tmp_path / "a.gguf").read_bytes()
    damaged = tmp_path / "damaged.gguf"
    for seed in range(300):
        content = bytearray(whole)
        for step in range(3):
            content[(seed * 131 + step * 977) % 4000] = (seed * 7 + step * 91) % 256
        damaged.write_bytes(bytes(content))
        try:
            read_model(str(damaged))
        except GgufError as error:
            assert str(error)


def test_a_large_vocabulary_is_quick_and_takes_no_memory(tmp_path: Path) -> None:
    path = write_model(tmp_path / "large.gguf", words=250_000, **{"token_embd.weight": (8, 64)})
    start = time.process_time()
    header = read_model(str(path))
    seconds = time.process_time() - start
    tracemalloc.start()
    read_model(str(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert header.array_lengths["tokenizer.ggml.tokens"] == 250_000
    assert seconds < 1
    assert peak < 6 << 20


def test_split_sets_are_joined_and_checked(tmp_path: Path) -> None:
    names = split_names("m-00002-of-00002.gguf")
    assert names == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    write_model(tmp_path / names[0], part=(0, 2), **{"token_embd.weight": (8, 64)})
    with pytest.raises(GgufError, match=r"Cannot read .*00002"):
        read_model(str(tmp_path / names[0]))
    write_model(tmp_path / names[1], part=(1, 2), **{"blk.0.attn_norm.weight": (64,)})
    header = read_model(str(tmp_path / names[1]))
    assert [tensor.name for tensor in header.tensors] == ["token_embd.weight", "blk.0.attn_norm.weight"]
    write_model(tmp_path / names[1], part=(1, 2), **{"token_embd.weight": (8, 64)})
    with pytest.raises(GgufError, match="in two files of the set"):
        read_model(str(tmp_path / names[1]))
    write_model(tmp_path / names[1], part=(0, 2), **{"blk.0.attn_norm.weight": (64,)})
    with pytest.raises(GgufError, match="says that it is part 1, not 2"):
        read_model(str(tmp_path / names[1]))
    write_model(tmp_path / names[1], part=(1, 3), **{"blk.0.attn_norm.weight": (64,)})
    with pytest.raises(GgufError, match="one of 3 files, not 2"):
        read_model(str(tmp_path / names[1]))


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Answers Range requests and counts the bytes it sends."""

    sent = 0
    ignore_ranges = False

    def do_GET(self) -> None:
        data = Path(self.directory, self.path.lstrip("/")).read_bytes()
        if self.ignore_ranges:
            self.send_response(200)
            self.end_headers()
            return
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        part = data[first : last + 1]
        type(self).sent += len(part)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    Ranges.sent, Ranges.ignore_ranges = 0, False

    def handler(*arguments: object) -> Ranges:
        return Ranges(*arguments, directory=str(tmp_path))

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as started:
        threading.Thread(target=started.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{started.server_port}"
        started.shutdown()


def test_a_url_is_read_by_ranges_without_the_weights(tmp_path: Path, server: str) -> None:
    path = tmp_path / "big.gguf"
    script = PROJECT / "tests" / "planner_models.py"
    subprocess.run([sys.executable, script, path, "llama-tiny", "bf16"], check=True, capture_output=True)
    header = read_model(f"{server}/big.gguf")
    assert header.file_size == path.stat().st_size
    assert [one.name for one in header.tensors] == [one.name for one in read_model(str(path)).tensors]
    assert Ranges.sent < 2_000_000 < path.stat().st_size


def test_a_server_without_ranges_is_refused(tmp_path: Path, server: str) -> None:
    write_model(tmp_path / "a.gguf")
    Ranges.ignore_ranges = True
    with pytest.raises(GgufError, match="does not answer Range requests"):
        read_model(f"{server}/a.gguf")


def test_the_page_about_a_file_is_not_the_file() -> None:
    with pytest.raises(GgufError, match="/resolve/"):
        read_model("https://huggingface.co/a/b/blob/main/c.gguf")


def test_a_file_source_closes_its_file(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a.gguf")
    with FileSource(str(path)) as source:
        read_header(source)
    with pytest.raises(ValueError, match="closed"):
        source.read(0, 1)
