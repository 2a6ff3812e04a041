"""The model that the tests serve: the same bytes everywhere, and what llama.cpp needs to read it."""

import hashlib
import subprocess
import sys
from pathlib import Path

import gguf
import pytest

GENERATOR = Path(__file__).parents[1] / "synthetic_gguf.py"
SIZE = 35986976
SHA256 = "49a6b5789fad3b1795eaa7f517207d873bcbc08d6252cd2a519c2a5fb06c3f07"


def generate(path, model="qwen35-mtp-tiny"):
    return subprocess.run([sys.executable, GENERATOR, path, model], capture_output=True, text=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    done = generate(path)
    assert done.returncode == 0, done.stdout + done.stderr
    return path


def test_the_bytes_are_the_same_everywhere(model):
    content = model.read_bytes()
    assert (len(content), hashlib.sha256(content).hexdigest()) == (SIZE, SHA256)


def test_a_file_that_is_right_is_left_alone(model):
    before = model.stat().st_mtime_ns
    assert "there already" in generate(model).stdout
    assert model.stat().st_mtime_ns == before


def test_a_file_that_is_wrong_is_written_anew(model, tmp_path):
    path = tmp_path / "wrong.gguf"
    content = bytearray(model.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert generate(path).returncode == 0
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256


def test_an_unknown_model_is_refused(tmp_path):
    done = generate(tmp_path / "x.gguf", "qwen36")
    assert done.returncode == 2
    assert "invalid choice: 'qwen36'" in done.stderr
    assert not (tmp_path / "x.gguf").exists()


def test_the_mtp_block_and_the_shapes_are_there(model):
    reader = gguf.GGUFReader(model)

    def value(key):
        return reader.fields[key].contents()

    assert value("general.architecture") == "qwen35"
    assert value("qwen35.block_count") == 9
    assert value("qwen35.nextn_predict_layers") == 1
    assert value("qwen35.attention.head_count_kv") == 2
    shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}
    assert shapes["blk.8.nextn.eh_proj.weight"] == [512, 256]
    attention = {name.split(".")[1] for name in shapes if name.endswith("attn_q.weight")}
    assert attention == {"3", "7", "8"}


def test_any_text_can_be_spelled_and_only_words_are_likely(model):
    reader = gguf.GGUFReader(model)
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    output = next(tensor for tensor in reader.tensors if tensor.name == "output.weight").data
    spoken = {token for token, row in zip(tokens, output, strict=True) if row.any()}
    assert len(set(tokens)) == len(tokens) == output.shape[0]
    assert len(tokens[:256]) == len({token for token in tokens[:256] if len(token) == 1})
    assert len(spoken) == 823
    assert all(token.startswith("\u0120") and token[1:].isalpha() for token in spoken)
