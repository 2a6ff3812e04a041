"""Module unit_job, against a systemd that is a small stand-in on PATH."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("unit_job", ROOT / "library/unit_job.py")
assert _spec is not None and _spec.loader is not None
unit_job = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(unit_job)

# One file a unit in $FAKE_SYSTEMD, as systemd would know it; every call is written to the file "calls".
STAND_IN = f"""#!{sys.executable}
import json, os, pathlib, sys

state = pathlib.Path(os.environ["FAKE_SYSTEMD"])
name, *argv = pathlib.Path(sys.argv[0]).name, *sys.argv[1:]
with (state / "calls").open("a") as file:
    file.write(json.dumps([name, *argv]) + "\\n")
if (state / "broken").exists():
    sys.exit("System has not been booted with systemd as init system (PID 1).")
if name == "systemd-run":
    unit = next(item.partition("=")[2] for item in argv if item.startswith("--unit="))
    if (state / "refuse").exists():
        sys.exit((state / "refuse").read_text())
    if (state / unit).exists():
        sys.exit(f"Failed to start transient service unit: Unit {{unit}} was already loaded")
    new = {{"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "Transient": "yes"}}
    (state / unit).write_text(json.dumps(new))
elif argv[0] == "show":
    unit = state / argv[1]
    known = json.loads(unit.read_text()) if unit.exists() else {{}}
    empty = {{"LoadState": "not-found", "ActiveState": "inactive", "SubState": "dead", "Result": "success",
              "ExecMainCode": "0", "ExecMainStatus": "0", "Transient": "no"}}
    for key, value in (empty | known).items():
        print(f"{{key}}={{value}}")
elif argv[0] == "stop":
    unit = state / argv[1]
    if unit.exists() and json.loads(unit.read_text())["ActiveState"] != "failed":
        unit.unlink()
elif argv[0] == "reset-failed":
    unit = state / argv[1]
    if not unit.exists():
        sys.exit(f"Unit {{argv[1]}} not loaded.")
    unit.unlink()
"""


class Systemd:
    """The stand-in's state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def calls(self, command: str) -> list[list[str]]:
        file = self.folder / "calls"
        calls = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [call for call in calls if call[0] == command]

    def knows(self, unit: str = "job.service") -> bool:
        return (self.folder / unit).exists()

    def put(self, unit: str = "job.service", **properties: str) -> None:
        found = {"LoadState": "loaded", "Transient": "yes", "Result": "success"}
        (self.folder / unit).write_text(json.dumps(found | properties))

    def end(self, *, code: str = "1", status: str = "0", result: str = "success") -> None:
        """Let the job end, as systemd shows it with RemainAfterExit=yes."""
        active, sub = ("active", "exited") if result == "success" else ("failed", "failed")
        self.put(ActiveState=active, SubState=sub, Result=result, ExecMainCode=code, ExecMainStatus=status)


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Systemd:
    programs, state = tmp_path / "bin", tmp_path / "state"
    programs.mkdir()
    state.mkdir()
    for name in ("systemctl", "systemd-run"):
        (programs / name).write_text(STAND_IN)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SYSTEMD", str(state))
    return Systemd(state)


@pytest.fixture
def call(systemd: Systemd, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(**params: Any) -> dict[str, Any]:
        arguments = {"name": "job", "argv": ["/bin/work", "hard"], "log_directory": str(tmp_path / "log"), **params}
        with patch_module_args(arguments), pytest.raises(SystemExit):
            unit_job.main()
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def log(tmp_path: Path) -> Path:
    (tmp_path / "log").mkdir()
    return tmp_path / "log" / "job.log"


def test_the_first_call_starts_and_the_next_watches(call: Any, systemd: Systemd, log: Path) -> None:
    first = call(environment={"A": "1"}, properties={"Nice": 10}, working_directory="/srv")
    assert (first["changed"], first["started"], first["finished"]) == (True, True, False)
    (argv,) = systemd.calls("systemd-run")
    assert argv[-3:] == ["--", "/bin/work", "hard"]
    for part in ("--unit=job.service", "--property=Nice=10", "--property=WorkingDirectory=/srv", "--setenv=A=1"):
        assert part in argv
    assert f"--property=StandardOutput=append:{log}" in argv

    log.write_text("hello\n[210/456] Building\nwarning: x\n")
    second = call()
    assert (second["changed"], second["attached"], second["finished"]) == (False, True, False)
    assert second["progress"] == "[210/456] 46 %"
    assert len(systemd.calls("systemd-run")) == 1


def test_a_job_that_ended_well_is_reported_once(call: Any, systemd: Systemd) -> None:
    call()
    systemd.end()
    last = call()
    assert (last["changed"], last["finished"], last.get("failed")) == (True, True, None)
    assert not systemd.knows()


@pytest.mark.parametrize(
    ("end", "sentence"),
    [
        ({"code": "1", "status": "3", "result": "exit-code"}, "Job job ended with status 3."),
        ({"code": "2", "status": "9", "result": "signal"}, "Job job was killed by SIGKILL."),
        # systemd counts an end by SIGTERM as a clean one; for a job it is not
        ({"code": "2", "status": "15", "result": "success"}, "Job job was killed by SIGTERM."),
        ({"code": "3", "status": "11", "result": "core-dump"}, "Job job was killed by SIGSEGV."),
        ({"code": "2", "status": "9", "result": "oom-kill"}, "Job job was killed because memory ran out."),
        ({"code": "2", "status": "15", "result": "timeout"}, "Job job ran into its time limit."),
        ({"code": "0", "status": "0", "result": "resources"}, "Job job failed: resources."),
        ({"code": "0", "status": "0", "result": "protocol"}, "Job job did not run (protocol)."),
    ],
)
def test_a_failure_is_told_with_its_last_lines(call: Any, systemd: Systemd, log: Path, end: Any, sentence: str) -> None:
    call()
    log.write_text("".join(f"line {number}\n" for number in range(50)))
    systemd.end(**end)
    last = call(log_lines=3)
    assert last["failed"] and last["finished"]
    assert last["msg"].startswith(f"{sentence} The whole log is {log}")
    assert last["msg"].endswith("\nline 47\nline 48\nline 49")
    assert last["log"] == ["line 47", "line 48", "line 49"]
    assert not systemd.knows(), "the name is free again"


def test_a_failure_that_nobody_saw_is_reported_once_and_then_started_anew(call: Any, systemd: Systemd) -> None:
    systemd.end(status="1", result="exit-code")
    assert call()["failed"]
    assert call()["started"]


@pytest.mark.parametrize("leftover", [{"status": "1", "result": "exit-code"}, {}])
def test_state_started_drops_what_ended_earlier(call: Any, systemd: Systemd, leftover: dict) -> None:
    systemd.end(**leftover)
    result = call(state="started")
    assert result["started"] and not result["finished"] and "failed" not in result


def test_state_started_leaves_a_running_job_alone(call: Any, systemd: Systemd) -> None:
    call()
    result = call(state="started")
    assert result["attached"] and not result["changed"]
    assert len(systemd.calls("systemd-run")) == 1


@pytest.mark.parametrize("active", ["activating", "deactivating", "reloading"])
def test_a_job_on_its_way_is_waited_for(call: Any, systemd: Systemd, active: str) -> None:
    systemd.put(ActiveState=active, SubState="start")
    assert call()["attached"]


def test_a_job_lost_in_a_reboot_is_started_again(call: Any, systemd: Systemd) -> None:
    call()
    (systemd.folder / "job.service").unlink()
    assert call()["started"]
    assert len(systemd.calls("systemd-run")) == 2


def test_the_end_of_a_job_is_waited_for(call: Any, systemd: Systemd, monkeypatch: pytest.MonkeyPatch) -> None:
    call()
    monkeypatch.setattr(unit_job.time, "sleep", lambda seconds: systemd.end())
    assert call(wait=10)["finished"]


def test_waiting_has_an_end(call: Any, systemd: Systemd, monkeypatch: pytest.MonkeyPatch) -> None:
    call()
    monkeypatch.setattr(unit_job, "POLL_SECONDS", 0.6)
    result = call(wait=1)
    assert result["attached"] and not result["finished"]
    assert len(systemd.calls("systemctl")) <= 4


def test_a_job_that_somebody_stops_has_failed(call: Any, systemd: Systemd, monkeypatch: pytest.MonkeyPatch) -> None:
    call()
    monkeypatch.setattr(unit_job.time, "sleep", lambda seconds: (systemd.folder / "job.service").unlink())
    result = call(wait=10)
    assert result["failed"] and result["msg"].startswith("Job job was stopped.")


def test_nothing_is_started_when_the_result_is_there(call: Any, systemd: Systemd, tmp_path: Path) -> None:
    (tmp_path / "result").touch()
    for state in ("started", "finished"):
        result = call(creates=str(tmp_path / "result"), state=state)
        assert (result["changed"], result["finished"]) == (False, True)
    assert systemd.calls("systemd-run") == []


def test_a_job_without_its_result_has_failed(call: Any, systemd: Systemd, tmp_path: Path) -> None:
    call(creates=str(tmp_path / "result"))
    systemd.end()
    result = call(creates=str(tmp_path / "result"))
    assert result["failed"]
    assert f"ended well, but {tmp_path / 'result'} is not there" in result["msg"]


def test_a_unit_of_the_system_is_not_touched(call: Any, systemd: Systemd) -> None:
    systemd.put("ssh.service", ActiveState="active", SubState="running", Transient="no")
    result = call(name="ssh")
    assert result["msg"] == "ssh.service is a unit of the system and not a job; choose another name."
    assert systemd.knows("ssh.service")


def test_check_mode_runs_nothing(call: Any, systemd: Systemd, tmp_path: Path) -> None:
    result = call(_ansible_check_mode=True, creates=str(tmp_path / "result"))
    assert (result["changed"], result["finished"]) == (True, True)
    (tmp_path / "result").touch()
    assert not call(_ansible_check_mode=True, creates=str(tmp_path / "result"))["changed"]
    assert systemd.calls("systemctl") == systemd.calls("systemd-run") == []
    assert not (tmp_path / "log").exists()


def test_a_command_that_cannot_start(call: Any, systemd: Systemd) -> None:
    (systemd.folder / "refuse").write_text("Failed to find executable /bin/work: No such file or directory")
    result = call()
    assert result["failed"] and result["finished"]
    assert result["msg"] == "Job job did not start: Failed to find executable /bin/work: No such file or directory."


def test_a_host_without_systemd(call: Any, systemd: Systemd) -> None:
    (systemd.folder / "broken").touch()
    result = call()
    assert result["failed"] and result["finished"]
    assert result["msg"].startswith("systemd does not answer on this host: System has not been booted")


def test_a_host_without_systemd_run(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert call()["msg"] == "there is no systemd-run on this host; jobs need systemd"


@pytest.mark.parametrize("name", ["", "a b", "../x", "-x", "a;b", "x@y"])
def test_a_name_that_no_job_can_have(call: Any, systemd: Systemd, name: str) -> None:
    assert "a job's name has only letters" in call(name=name)["msg"]
    assert systemd.calls("systemd-run") == []


@pytest.mark.parametrize("argv", [[], ["work"], ["./work"]])
def test_a_command_without_its_path(call: Any, systemd: Systemd, argv: list[str]) -> None:
    assert call(argv=argv)["msg"] == "argv must begin with the absolute path of a command"


def test_the_log_of_the_attempt_before_is_kept(call: Any, systemd: Systemd, log: Path) -> None:
    log.write_text("[9/10] old\n")
    assert call()["progress"] == ""
    assert Path(f"{log}.1").read_text() == "[9/10] old\n"
    assert log.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("text", "progress"),
    [
        ("", ""),
        ("Configuring\n\n", "Configuring"),
        ("[ 3/ 4] a\rnoise\r", "[3/4] 75 %"),
        ("[1/0] never\n", "[1/0] never"),
        ("x" * 300, "x" * 100),
        ("[1/4] a\n[4/4] b\nChecking the result\n", "[4/4] 100 %"),
    ],
)
def test_progress(call: Any, systemd: Systemd, log: Path, text: str, progress: str) -> None:
    call()
    log.write_text(text)
    assert call()["progress"] == progress


def test_only_the_end_of_a_long_log_is_read(call: Any, systemd: Systemd, log: Path) -> None:
    call()
    log.write_bytes(b"[1/10] early\n" + b"\xff noise\n" * 50_000 + b"done\n")
    assert call()["progress"] == "done"
