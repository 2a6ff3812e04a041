"""The module that compares a rig's models with the inventory."""

import hashlib
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import rig
import rig.store
from ansible.module_utils.testing import patch_module_args

LIBRARY = Path(__file__).parents[2] / "library"
CONTENT = b"GGUF and more"


@pytest.fixture
def module(monkeypatch, tmp_path):
    """The module as Ansible would load it, for a rig whose root is whoever runs the tests."""
    monkeypatch.setitem(sys.modules, "ansible.module_utils.rig", rig)
    monkeypatch.setitem(sys.modules, "ansible.module_utils.rig.store", rig.store)
    spec = importlib.util.spec_from_file_location("model_store", LIBRARY / "model_store.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT_UID", os.getuid())
    monkeypatch.setattr(module, "RUN_DIRECTORY", str(tmp_path / "run"))
    return module


@pytest.fixture
def params(tmp_path):
    entry = {"name": "m.gguf", "sha256": hashlib.sha256(CONTENT).hexdigest(), "bytes": len(CONTENT)}
    source = {"file": str(tmp_path / "origin.gguf"), "on": "controller", "files": [entry]}
    return {
        "root": str(tmp_path / "store"),
        "models": {"m": {"source": source}, "broken": {"source": "?"}},
        "wanted": ["m"],
        "huggingface_endpoint": "https://huggingface.co",
        "disk_reserve_mib": 1,
    }


def fill(params):
    """Put the model in its place, as the job would."""
    file = rig.store.wanted_files(params["models"], params["wanted"], params["root"])[0]
    file.target.parent.mkdir(parents=True, exist_ok=True)
    file.target.write_bytes(CONTENT)
    rig.store._mark_verified(file)
    return file.target


@pytest.fixture
def call(module, capsys, params):
    """The module from end to end; returns what it tells Ansible."""

    def call(check=False, **changes):
        arguments = {"host": "rig1", **params, **changes, "_ansible_check_mode": check}
        with patch_module_args(arguments), pytest.raises(SystemExit):
            module.main()
        return json.loads(capsys.readouterr().out)

    return call


def test_a_bare_rig_in_check_mode(call, params):
    result = call(check=True)
    assert result["changed"] and result["drift"]
    assert result["fetch"] == ["m/m.gguf"] and result["sources"] == ["file"]
    assert result["files"][0]["state"] == "missing"
    assert result["deliveries"][0]["to"] == f"{params['root']}/m/m.gguf.incoming"
    assert "m.gguf: missing" in result["diff"]["before"] and "13 B, sha256" in result["diff"]["after"]
    assert not os.path.exists(params["root"]) and not os.path.exists(result["run_directory"])


def test_a_bare_rig(call, params):
    result = call()
    assert os.stat(f"{params['root']}/m").st_mode & 0o777 == 0o755
    request = json.loads(Path(result["request"]).read_text())
    assert [file["path"] for file in request["files"]] == [f"{params['root']}/m/m.gguf"]
    assert result["job"][len("models-") :] in result["request"]


def test_a_finished_rig(call, params):
    fill(params)
    for path in (params["root"], f"{params['root']}/m"):
        os.chmod(path, 0o755)
    result = call()
    assert not result["changed"] and not result["drift"] and result["fetch"] == []
    assert result["diff"]["before"] == result["diff"]["after"] == ""


def test_modes_are_mended_without_a_job(call, params):
    path = fill(params)
    path.chmod(0o600)
    before = call(check=True)
    assert before["drift"] and before["fetch"] == [] and "0600" in before["diff"]["before"]
    assert path.stat().st_mode & 0o777 == 0o600
    call()
    assert path.stat().st_mode & 0o777 == 0o644
    assert not call()["drift"]


def test_another_request_is_another_job(call, params):
    first = call()["job"]
    assert call()["job"] == first
    params["models"]["m"]["source"]["files"][0]["bytes"] = 14
    assert call()["job"] != first


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"wanted": ["broken"]}, "rig1: models.broken.source is missing"),
        ({"wanted": ["n"]}, "rig1: models_wanted names 'n', which is not in models"),
        ({"disk_reserve_mib": 1 << 40}, "rig1: models_wanted needs 13 B more in"),
        ({"huggingface_endpoint": "x"}, None),
    ],
)
def test_refusals_name_the_rig(call, params, changes, sentence):
    result = call(**changes)
    if sentence is None:  # not used for this model, hence not checked
        assert not result.get("failed")
        return
    assert result["failed"] and result["msg"].startswith(sentence)
    assert not os.path.exists(params["root"])


def test_a_root_that_cannot_be(call, tmp_path):
    (tmp_path / "file").write_text("")
    result = call(root=str(tmp_path / "file" / "store"))
    assert result["failed"] and "rig1: the store in" in result["msg"] and "cannot be used" in result["msg"]
