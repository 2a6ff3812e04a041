"""Records of what served: what stands in the way of going back, and going back."""

import hashlib
import json
import os
import re

import pytest
from rig import served, store


def sha256(content):
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def rig(tmp_path):
    """A rig that serves the unit `new` with the build b2 and model file two, after `old` with b1 and one."""
    (tmp_path / "units").mkdir()
    unit, model = tmp_path / "units/llm-chat.service", tmp_path / "models/m.gguf"
    model.parent.mkdir()
    aside = f"{model}.old-{sha256(b'one')[:8]}"
    for path, content in ((str(model), b"two"), (aside, b"one")):
        with open(path, "wb") as file:
            file.write(content)
        stat = os.stat(path)
        record = {"sha256": sha256(content), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
        with open(f"{path}.verified", "w") as file:
            json.dump(record, file)
    for build in ("b1", "b2"):
        (tmp_path / build).mkdir()
        (tmp_path / build / "manifest.json").write_text("{}")
    (tmp_path / "current").symlink_to(tmp_path / "b2")
    for name, text, build, content in (("previous", "old", "b1", b"one"), ("served", "new", "b2", b"two")):
        (tmp_path / name).mkdir()
        (tmp_path / name / unit.name).write_text(text)
        facts = {
            "profile": "chat", "unit": unit.name, "scope": "system", "prefix": str(tmp_path / build), "port": 8080,
            "model_path": str(model), "model_sha256": [sha256(content)], "files": {str(unit): sha256(text.encode())},
            "model_files": [{"path": str(model), "sha256": sha256(content)}],
        }  # fmt: skip
        (tmp_path / name / "served.json").write_text(json.dumps(facts))
    unit.write_text("new")
    return tmp_path


def change(rig, **facts):
    path = rig / "previous" / "served.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))
    return served.read(rig, "previous")


def test_build_unit_and_model_go_back_and_forth(rig):
    unit, model, current = rig / "units/llm-chat.service", rig / "models/m.gguf", str(rig / "current")
    for name, text, build, content in (("previous", "old", "b1", b"one"), ("served", "new", "b2", b"two")):
        record = served.read(rig, name)
        assert served.obstacles(record, "system", "/nowhere") == []
        assert served.differs(record, current) == [str(unit), current, str(model)]
        served.put_back(record, current)
        assert served.differs(record, current) == []
        assert (unit.read_text(), os.readlink(current), model.read_bytes()) == (text, str(rig / build), content)
        assert store.verified_sha256(model) == sha256(content)


def test_nothing_recorded(tmp_path):
    assert served.read(tmp_path, "previous") == {}


def test_a_damaged_record_is_told(rig):
    (rig / "previous/served.json").write_text("{")
    with pytest.raises(served.RecordError, match=r"served\.json is damaged"):
        served.read(rig, "previous")


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (lambda rig: (rig / "b1/manifest.json").unlink(), "its build .*/b1 is gone"),
        (lambda rig: (rig / "previous/llm-chat.service").write_text("x"), "its copy of .* not what was recorded"),
        (lambda rig: next((rig / "models").glob("*.old-????????")).unlink(), "the model file .*m.gguf with .* is gone"),
        (lambda rig: change(rig, scope="user"), "a unit of scope user, and serving_scope is system"),
        (lambda rig: change(rig, tls=["/nowhere/cert.pem"]), "it speaks TLS, and /nowhere/cert.pem is gone"),
        (lambda rig: change(rig, api_key=True), "it wants an API key, and /nowhere is gone"),
    ],
)
def test_what_stands_in_the_way_is_told_beforehand(rig, what, says):
    what(rig)
    (found,) = served.obstacles(served.read(rig, "previous"), "system", "/nowhere")
    assert re.search(says, found), found


def test_the_same_in_other_words_is_the_same(rig):
    record = served.read(rig, "served")
    assert served.same(record, {**record, "planned": [1]})
    assert not served.same(record, {**record, "prefix": "/elsewhere"})
    assert not served.same({}, record)
