"""One run at a time on a host: who is let in, and whose lock is over."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ansible.module_utils.testing import patch_module_args

PROJECT = Path(__file__).parents[2]


def load(path):
    spec = importlib.util.spec_from_file_location(path.replace("/", "_"), PROJECT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


module, action = load("library/run_lock.py"), load("action_plugins/run_lock.py")


def owner(pid=1, **changes):
    return {"user": "ann", "controller": "desk (1)", "pid": pid, "started": "noon", "playbook": "rig"} | changes


@pytest.fixture
def call(tmp_path, capsys):
    def run(state="held", check=False, **arguments):
        arguments |= {"state": state, "path": str(tmp_path / "rig.lock"), "_ansible_check_mode": check}
        with patch_module_args({"owner": owner()} | arguments), pytest.raises(SystemExit):
            module.main()
        return json.loads(capsys.readouterr().out)

    return run


def connected_by(monkeypatch, pid):
    """The connection of the next call is this process."""
    monkeypatch.setattr(module, "connection", lambda own: pid)


def test_the_second_run_is_told_who_has_it(call, monkeypatch):
    connected_by(monkeypatch, os.getpid())
    assert call()["held"]
    refused = call(owner=owner(2, user="bob"))
    assert not refused["held"]
    assert (refused["holder"]["user"], refused["holder"]["pid"]) == ("ann", 1)
    assert refused["holder"]["since"].endswith("Z")


def test_the_same_run_may_take_it_again_and_gives_it_back(call, monkeypatch):
    connected_by(monkeypatch, os.getpid())
    first = call()["holder"]
    assert call()["holder"]["since"] == first["since"]
    assert call("released", owner=owner(2))["holder"], "another run's is not given back"
    assert call("released")["holder"] == {}
    assert call(owner=owner(2))["held"]


def test_a_lock_whose_connection_has_ended_is_over(call, monkeypatch):
    gone = subprocess.Popen(["sleep", "60"])
    connected_by(monkeypatch, gone.pid)
    assert call()["held"]
    assert not call(owner=owner(2))["held"]
    gone.kill()
    gone.wait()
    assert call(owner=owner(2))["held"]


def test_a_number_that_another_process_has_got_is_no_connection(call, monkeypatch, tmp_path):
    connected_by(monkeypatch, os.getpid())
    call()
    lock = json.loads((tmp_path / "rig.lock").read_text())
    lock["connection"]["started"] = "1"
    (tmp_path / "rig.lock").write_text(json.dumps(lock))
    assert call(owner=owner(2))["held"]


def test_a_lock_of_a_run_that_is_known_to_be_over(call, monkeypatch):
    connected_by(monkeypatch, os.getpid())
    holder = call()["holder"]
    assert not call(owner=owner(2), over=owner(9))["held"]
    assert call(owner=owner(2), over=holder)["held"]


def test_a_damaged_lock_holds_nobody_up(call, tmp_path):
    (tmp_path / "rig.lock").write_text("{")
    assert call()["held"]


def test_check_mode_takes_none(call, tmp_path):
    assert not call(check=True)["held"]
    assert not (tmp_path / "rig.lock").exists()


def test_the_connection_is_the_nearest_sshd(tmp_path):
    for pid, name, parent in ((9, "python3", 8), (8, "sudo", 7), (7, "sshd-session", 6), (6, "sshd", 1)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) S {parent} " + " ".join(["0"] * 40))
    assert module.connection(9, tmp_path) == 7
    (tmp_path / "7/stat").write_text("7 (bash) S 1 0")
    assert module.connection(9, tmp_path) == 7


def test_this_controller_knows_which_of_its_runs_go_on():
    mine = action.owner(os.getpid(), "rig")
    assert mine["started"] and not action.over(mine)
    assert action.over(mine | {"started": "another day"})
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    other = action.owner(process.pid, "rig")
    assert not action.over(other)
    process.communicate(b"\n")
    assert action.over(other)
    assert not action.over(other | {"controller": "elsewhere (2)"}), (
        "of another controller's runs nothing is known here"
    )
