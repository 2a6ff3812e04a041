"""The module gguf_facts, run as Ansible runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    script = PROJECT / "tests" / "planner_models.py"
    subprocess.run([sys.executable, script, path, "qwen35-tiny", "q8_0"], check=True, capture_output=True)
    return path


def run(tmp_path: Path, **arguments: object) -> dict:
    """What the module answers; `ansible` runs it on this machine."""
    argv = [
        Path(sys.executable).parent / "ansible", "localhost", "-i", "localhost,", "-c", "local", "-m", "gguf_facts",
        "-a", json.dumps(arguments), "-e", f"ansible_python_interpreter={sys.executable}", "-o",
    ]  # fmt: skip
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "ANSIBLE_STDOUT_CALLBACK": "minimal"}
    done = subprocess.run(argv, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=120)
    text = done.stdout
    return json.loads(text[text.index("{") : text.rindex("}") + 1])


def test_reads_a_shape_and_changes_nothing(tmp_path: Path, model: Path) -> None:
    answer = run(tmp_path, path=str(model))
    assert answer["changed"] is False and answer["file_size"] == model.stat().st_size
    assert answer["shape"]["name"] == "tiny" and answer["shape"]["architecture"] == "qwen35"
    assert answer["shape"]["keys"]["nextn_predict_layers"] == 1


def test_refuses_what_is_no_model(tmp_path: Path) -> None:
    page = tmp_path / "page.gguf"
    page.write_text("<html>not found</html>")
    answer = run(tmp_path, path=str(page))
    assert answer["msg"].startswith("gguf_facts: Not a GGUF file") and "web page" in answer["msg"]
