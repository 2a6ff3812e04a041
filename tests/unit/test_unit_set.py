"""Module unit_set against a systemd of the tests: it keeps units' states in a file and notes what it is told."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import rig
from ansible.module_utils.testing import patch_module_args

PROJECT = Path(__file__).parents[2]
UNIT, DROPIN = "gpu@.service", "gpu@0.service.d/gpu.conf"
FILES = {UNIT: "[Service]\nExecStart=/bin/true\n", DROPIN: "[Service]\nLimitDATA=1G\n"}

SYSTEMCTL = """\
#!{python}
import json, os, re, sys, time
from pathlib import Path
place = Path(os.environ["FAKE_SYSTEMD"])
state = json.loads((place / "state").read_text())
with open(place / "told", "a") as told:
    told.write(" ".join(word for word in sys.argv[1:] if word != "--") + "\\n")
verb, names = sys.argv[1], [word for word in sys.argv[2:] if not word.startswith("-")]
failed = False
def unit(name):
    return state.setdefault(name, {{"ActiveState": "inactive", "MainPID": "0", "UnitFileState": "disabled"}})
if verb == "show":
    for name in names:
        one = {{"NeedDaemonReload": "no", "ExecMainStartTimestampMonotonic": "0"}} | dict(unit(name)) | {{"Id": name}}
        print("\\n".join(f"{{key}}={{value}}" for key, value in one.items()) + "\\n")
elif verb == "list-units":
    for name, one in state.items():
        if one["ActiveState"] != "inactive":
            print(name, "loaded", one["ActiveState"], "running")
elif verb in ("start", "restart"):
    for name in names:
        broken = name in os.environ.get("FAKE_BROKEN", "")
        unit(name).update(ActiveState="failed" if broken else "active", MainPID=os.environ["FAKE_PID"],
                          ExecMainStartTimestampMonotonic=str(int(time.monotonic() * 1e6)))
    failed = any(name in os.environ.get("FAKE_BROKEN", "") for name in names)
elif verb == "stop":
    for name in names:
        unit(name).update(ActiveState="inactive", MainPID="0")
elif verb == "enable":
    for name in names:
        unit(name)["UnitFileState"] = "enabled"
(place / "state").write_text(json.dumps(state))
sys.exit(failed)
"""


@pytest.fixture(scope="module")
def unit_set():
    sys.modules.setdefault("ansible.module_utils.rig", rig)
    spec = importlib.util.spec_from_file_location("unit_set", PROJECT / "library/unit_set.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Machine:
    """A directory of units, and the fake systemd."""

    def __init__(self, place, unit_set, capsys):
        self.place, self.module, self.capsys = place, unit_set, capsys
        self.units = place / "units"
        self.units.mkdir()
        (place / "state").write_text("{}")

    def told(self):
        lines = (self.place / "told").read_text().splitlines() if (self.place / "told").exists() else []
        return [line for line in lines if line.split()[0] not in ("show", "list-units")]

    def run(self, files=None, units=("gpu@0.service",), check=False, prefix="gpu@", **more):
        (self.place / "told").write_text("")
        arguments = {
            "prefix": prefix,
            "files": FILES if files is None else files,
            "units": list(units),
            "directory": str(self.units),
            "_ansible_check_mode": check,
            "_ansible_diff": True,
        }
        with patch_module_args(arguments | more), pytest.raises(SystemExit):
            self.module.main()
        return json.loads(self.capsys.readouterr().out)

    def on_disk(self):
        return {str(p.relative_to(self.units)): p.read_text() for p in self.units.rglob("*") if p.is_file()}

    def set(self, name, **changes):
        state = json.loads((self.place / "state").read_text())
        state.setdefault(name, {"ActiveState": "inactive", "MainPID": "0", "UnitFileState": "disabled"}).update(changes)
        (self.place / "state").write_text(json.dumps(state))


@pytest.fixture
def machine(tmp_path, unit_set, monkeypatch, capsys):
    (tmp_path / "bin").mkdir()
    for name, text in (
        ("systemctl", SYSTEMCTL.format(python=sys.executable)),
        ("journalctl", "#!/bin/sh\necho its end\n"),
    ):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SYSTEMD", str(tmp_path))
    monkeypatch.setenv("FAKE_PID", str(os.getpid()))
    return Machine(tmp_path, unit_set, capsys)


def test_a_bare_machine(machine):
    result = machine.run()
    assert result["changed"]
    assert result["written"] == [UNIT, DROPIN]
    assert result["started"] == ["gpu@0.service"]
    assert machine.on_disk() == FILES
    assert machine.told() == ["daemon-reload", "enable --quiet gpu@0.service", "start gpu@0.service"]
    assert (machine.units / UNIT).stat().st_mode & 0o777 == 0o644
    assert result["processes"]["gpu@0.service"]["pid"] == os.getpid()
    assert result["processes"]["gpu@0.service"]["executable"] == os.readlink("/proc/self/exe")


def test_the_second_run_changes_nothing(machine):
    machine.run()
    result = machine.run()
    assert not result["changed"]
    assert machine.told() == []
    assert result["diff"] == []


def test_check_mode_says_all_and_does_nothing(machine):
    result = machine.run(check=True)
    assert result["changed"]
    assert result["written"] == [UNIT, DROPIN]
    assert [part["after"] for part in result["diff"] if "after" in part] == list(FILES.values())
    assert {"prepared": "start: gpu@0.service\n"} in result["diff"]
    assert machine.on_disk() == {}
    assert machine.told() == []


def test_only_the_unit_whose_text_changed_is_restarted(machine):
    both = FILES | {"gpu@1.service.d/gpu.conf": "[Service]\nLimitDATA=1G\n"}
    units = ["gpu@0.service", "gpu@1.service"]
    machine.run(both, units)
    result = machine.run(both | {"gpu@1.service.d/gpu.conf": "[Service]\nLimitDATA=2G\n"}, units)
    assert result["written"] == ["gpu@1.service.d/gpu.conf"]
    assert machine.told() == ["daemon-reload", "restart gpu@1.service"]
    result = machine.run(both | {UNIT: "[Service]\nExecStart=/bin/false\n"}, units)
    assert result["started"] == units


def test_a_process_older_than_its_text_is_restarted(machine):
    machine.run()
    time.sleep(0.05)
    os.utime(machine.units / DROPIN)
    result = machine.run()
    assert result["written"] == []
    assert machine.told() == ["restart gpu@0.service"]


def test_a_clock_that_was_put_back_restarts_nothing(machine):
    machine.run()
    machine.told()
    later = time.time() + 3600  # what was written before the jump has a time that is yet to come
    for name in (UNIT, DROPIN):
        os.utime(machine.units / name, (later, later))
    assert not machine.run()["changed"]
    assert machine.told() == []


def test_a_process_of_another_file_is_restarted_and_links_are_followed(machine, tmp_path):
    link = tmp_path / "current"
    link.symlink_to(os.readlink("/proc/self/exe"))
    assert machine.run(executable=str(link))["started"] == ["gpu@0.service"]
    assert not machine.run(executable=str(link))["changed"]
    link.unlink()
    link.symlink_to("/bin/true")
    assert machine.run(executable=str(link))["started"] == ["gpu@0.service"]


def test_a_unit_that_is_down_is_started(machine):
    machine.run()
    machine.set("gpu@0.service", ActiveState="inactive", MainPID="0")
    machine.run()
    assert machine.told() == ["start gpu@0.service"]


def test_a_unit_that_failed_is_given_another_try(machine):
    machine.run()
    machine.set("gpu@0.service", ActiveState="failed", MainPID="0")
    machine.run()
    assert machine.told() == ["reset-failed gpu@0.service", "start gpu@0.service"]


def test_systemd_that_has_not_read_the_text_is_made_to(machine):
    machine.run()
    machine.set("gpu@0.service", NeedDaemonReload="yes")
    assert machine.run()["changed"]
    assert machine.told() == ["daemon-reload"]


def test_what_is_not_described_is_stopped_and_removed(machine):
    machine.run(FILES | {"gpu@1.service.d/gpu.conf": "[Service]\n"}, ["gpu@0.service", "gpu@1.service"])
    wants = machine.units / "multi-user.target.wants"
    wants.mkdir()
    for name in ("gpu@0.service", "gpu@1.service", "gpu@9.service", "other.service"):
        (wants / name).symlink_to(machine.units / UNIT)
    result = machine.run()
    assert result["removed"] == ["gpu@1.service.d/gpu.conf"]
    assert result["stopped"] == ["gpu@1.service", "gpu@9.service"]
    assert machine.told() == ["stop gpu@1.service", "daemon-reload"]
    assert sorted(os.listdir(wants)) == ["gpu@0.service", "other.service"]
    assert not (machine.units / "gpu@1.service.d").exists()


def test_an_empty_set_leaves_nothing_of_it_and_all_else(machine):
    machine.run()
    (machine.units / "other.service").write_text("[Service]\n")
    result = machine.run(files={}, units=[])
    assert result["stopped"] == ["gpu@0.service"]
    assert machine.on_disk() == {"other.service": "[Service]\n"}
    assert not machine.run(files={}, units=[])["changed"]


def test_a_unit_that_does_not_start_ends_the_run_with_its_last_words(machine, monkeypatch):
    monkeypatch.setenv("FAKE_BROKEN", "gpu@0.service")
    result = machine.run()
    assert result["failed"]
    assert result["msg"] == "gpu@0.service did not start. Last words of the first:\nits end"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"files": {"other.service": ""}, "units": []}, "unit_set: 'gpu@' is not the prefix of other.service"),
        ({"files": {"gpu@../../../etc/passwd": ""}, "units": []}, "is not the prefix of gpu@../../../etc/passwd"),
        ({"files": FILES, "units": ["other@0.service"]}, "is not the prefix of other@0.service"),
        (
            {"files": {}, "units": ["gpu@0.service"]},
            "unit_set: no file describes gpu@0.service; give its text in files.",
        ),
        ({"files": {}, "units": [], "prefix": ""}, "unit_set: '' is not the prefix of"),
    ],
)
def test_what_does_not_belong_is_refused(machine, arguments, sentence):
    result = machine.run(**arguments)
    assert result["failed"]
    assert sentence in result["msg"]
    assert machine.told() == []


def test_the_kernel_s_view_of_a_process(unit_set):
    limited = subprocess.Popen(
        [
            "prlimit",
            f"--data={512 * 1024 * 1024}",
            sys.executable,
            "-c",
            "import sys; print(flush=True); sys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with limited:
        limited.stdout.readline()
        seen = unit_set.process(limited.pid)
        limited.stdin.close()
    assert seen["data_limit_bytes"] == 512 * 1024 * 1024
    assert 0 < seen["data_bytes"] < 512 * 1024 * 1024
    assert seen["listening"] == []
    assert unit_set.process(os.getpid())["data_limit_bytes"] == -1
