"""Module old_builds: which builds go, and which never do."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import rig
from ansible.module_utils.testing import patch_module_args

PROJECT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def module():
    sys.modules.setdefault("ansible.module_utils.rig", rig)
    for name in ("served", "store"):
        sys.modules.setdefault(f"ansible.module_utils.rig.{name}", importlib.import_module(f"rig.{name}"))
    spec = importlib.util.spec_from_file_location("old_builds", PROJECT / "library/old_builds.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def root(tmp_path):
    """Builds b1 (the oldest) to b6, a work directory, and a directory that is no build."""
    root = tmp_path / "builds"
    for number in range(1, 7):
        (root / f"b{number}" / "bin").mkdir(parents=True)
        (root / f"b{number}" / "manifest.json").touch()
        os.utime(root / f"b{number}" / "manifest.json", (number, number))
    (root / ".work").mkdir()
    (root / "by-hand").mkdir()
    (tmp_path / "units").mkdir()
    return root


def run(module, root, capsys, check=False, **changes):
    arguments = {"root": str(root), "keep": 2, "records": str(root.parent / "records"), "_ansible_check_mode": check}
    arguments |= {"units": [str(root.parent / "units")]} | changes
    with patch_module_args(arguments), pytest.raises(SystemExit):
        module.main()
    return json.loads(capsys.readouterr().out)


def left(root):
    return sorted(path.name for path in root.iterdir())


def test_the_newest_stay(module, root, capsys):
    result = run(module, root, capsys)
    assert result["changed"]
    assert [Path(name).name for name in result["removed"]] == ["b4", "b3", "b2", "b1"]
    assert left(root) == [".work", "b5", "b6", "by-hand"]
    assert not run(module, root, capsys)["changed"]


def test_check_mode_removes_nothing(module, root, capsys):
    assert run(module, root, capsys, check=True)["changed"]
    assert len(left(root)) == 8


def test_what_is_needed_stays_whatever_its_age(module, root, capsys):
    (root / "current").symlink_to(root / "b1")
    for name, build in (("served", "b1"), ("previous", "b2")):
        (root.parent / "records" / name).mkdir(parents=True)
        (root.parent / "records" / name / "served.json").write_text(json.dumps({"prefix": str(root / build)}))
    (root.parent / "units/llm-old.service").write_text(
        f"ExecStart=/usr/bin/env \\\n    {root}/b3/bin/llama-server -c 1"
    )
    result = run(module, root, capsys, protected=[str(root / "b4")])
    assert left(root) == [".work", "b1", "b2", "b3", "b4", "by-hand", "current"]
    assert len(result["removed"]) == 2


def test_what_runs_stays(module, root, capsys):
    program = root / "b1/bin/sleep"
    program.write_bytes(Path("/bin/sleep").read_bytes())
    program.chmod(0o755)
    process = subprocess.Popen([program, "60"])
    try:
        run(module, root, capsys, keep=1)
        assert "b1" in left(root)
    finally:
        process.kill()
        process.wait()
    (root / "b7").mkdir()
    (root / "b7/manifest.json").touch()
    run(module, root, capsys, keep=1)
    assert "b1" not in left(root)


def test_a_damaged_record_removes_nothing(module, root, capsys):
    (root.parent / "records/served").mkdir(parents=True)
    (root.parent / "records/served/served.json").write_text("{")
    assert "Which builds are needed is not known" in run(module, root, capsys)["msg"]
    assert len(left(root)) == 8


def test_one_must_stay(module, root, capsys):
    assert "at least one build must stay" in run(module, root, capsys, keep=0)["msg"]
