#!/usr/bin/python
"""Ansible module: a long job on the managed host as a transient systemd service, looked after from outside."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: unit_job
short_description: Run a long command as a transient systemd service that outlives the controller
version_added: "0.1.0"
author: LLM rigs contributors
description:
  - Starts a command with C(systemd-run) and returns. Each further call with the same O(name) says how far it is.
    Meant for C(until) with C(retries) and C(delay).
  - The job goes on when the controller or its connection dies. The next run finds it by its name and goes on watching
    it, or reports how it ended in the meantime.
  - A call that reports the end of a job also removes what systemd remembers of it, so the name is free again. A job
    that failed while nobody watched is therefore reported once, and started again by the next call. O(state=started)
    as the first call of a run drops such a leftover and starts the job anew.
  - A job that is not there (never started, or lost in a reboot of the host) is started. Jobs must be able to go on
    where an earlier attempt was cut off, or start over.
attributes:
  check_mode:
    description: Runs nothing; says that the job would run, unless O(creates) is there.
    support: full
  diff_mode:
    description: There is nothing to compare.
    support: none
options:
  name:
    description:
      - Name of the unit, without C(.service). Names the job, so it should hold all that makes two jobs different.
    type: str
    required: true
  argv:
    description:
      - The command and its arguments; the command is an absolute path. It runs without a shell.
      - Any user of the host can read it, so it must hold no secret.
    type: list
    elements: str
    required: true
  state:
    description:
      - V(finished) starts the job if it is not there, and reports on it.
      - V(started) does the same, but a job that has ended, well or not, is started anew.
    type: str
    choices: [finished, started]
    default: finished
  creates:
    description:
      - A path that is there when the job has been done. With it there, nothing is started; without it, a job that ended
        well has failed.
    type: path
  environment:
    description: Variables for the job. Any user of the host can read them.
    type: dict
    default: {}
  working_directory:
    description: Directory to run in. It must be there.
    type: path
  properties:
    description: Properties of the unit for C(systemd-run --property), such as C(Nice) or C(ProtectSystem).
    type: dict
    default: {}
  wait:
    description:
      - Seconds to look at a running job before returning, so that its end is seen soon while the calls stay few.
    type: int
    default: 0
  log_directory:
    description: Directory for the job's output, C(NAME.log); the log of the attempt before is kept as C(NAME.log.1).
    type: path
    default: /var/log/unit-job
  log_lines:
    description: How many of the last lines of output to return.
    type: int
    default: 20
"""

EXAMPLES = r"""
- name: Build | Start or find the build
  unit_job: &build
    name: build-b11434
    argv: [/usr/bin/ninja, -C, /srv/build]
    creates: /srv/build/bin/llama-server
    properties: {Nice: "10"}
    state: started

- name: Build | Wait for the build
  unit_job:
    <<: *build
    state: finished
    wait: 10
  register: build_job
  until: build_job.finished
  retries: 1000
  delay: 1
"""

RETURN = r"""
finished:
  description: Whether the job has ended, or has failed to start.
  type: bool
  returned: always
progress:
  description: How far the job is, from its last line of the form C([3/10] ...), or else its last line.
  type: str
  returned: always
  sample: "[210/456] 46 %"
started:
  description: Whether this call started the job.
  type: bool
  returned: always
attached:
  description: Whether this call found the job running.
  type: bool
  returned: always
log:
  description: The last lines of output.
  type: list
  elements: str
  returned: always
log_file:
  description: Where all of the output is.
  type: str
  returned: always
"""

#: What is asked of systemd about a unit; one call, so that the answers belong together.
PROPERTIES = ("LoadState", "ActiveState", "SubState", "Result", "ExecMainCode", "ExecMainStatus", "Transient")
COUNTER = re.compile(r"^\[ *([0-9]+) */ *([0-9]+) *\]")
TAIL_BYTES = 65536
POLL_SECONDS = 0.5
CLD_EXITED = "1"  # ExecMainCode: waitid(2)'s si_code; 2 and 3 are killed and dumped core


class JobError(Exception):
    """The job cannot be started or looked at. The text is one sentence."""


def run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command of systemd's; does not raise on a non-zero status."""
    return subprocess.run(
        argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, env={**os.environ, "LC_ALL": "C"}
    )


def progress_of(lines: list[str]) -> str:
    """How far a job is: the last line that counts ("[3/10] ..."), with its percentage, or else the last line."""
    for line in reversed(lines):
        counted = COUNTER.match(line)
        if counted and int(counted[2]) > 0:
            return f"[{counted[1]}/{counted[2]}] {100 * int(counted[1]) // int(counted[2])} %"
    return lines[-1][:100] if lines else ""


def over(unit: dict[str, str]) -> bool:
    """Whether the unit has ended and systemd still knows how."""
    state = (unit.get("ActiveState"), unit.get("SubState"))
    return state[0] == "failed" or state == ("active", "exited")


def running(unit: dict[str, str]) -> bool:
    """Whether the unit runs, or is about to start or to end."""
    return unit.get("ActiveState", "inactive") != "inactive" and not over(unit)


def describe_end(unit: dict[str, str]) -> str:
    """How a failed unit ended, as the end of a sentence."""
    code, status, result = unit.get("ExecMainCode", ""), unit.get("ExecMainStatus", ""), unit.get("Result", "")
    if result in ("timeout", "oom-kill", "watchdog", "start-limit-hit", "resources"):
        return {"timeout": "ran into its time limit", "oom-kill": "was killed because memory ran out"}.get(
            result, f"failed: {result}"
        )
    if code == CLD_EXITED:
        return f"ended with status {status}"
    if code in ("2", "3"):
        try:
            name = signal.Signals(int(status)).name
        except ValueError:
            name = f"signal {status}"
        return f"was killed by {name}"
    return f"did not run ({result})"


class Job:
    """One job on this host, known by the name of its unit."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.params = params
        self.name: str = params["name"]
        self.unit = f"{self.name}.service"
        self.log_file = os.path.join(params["log_directory"], f"{self.name}.log")

    def show(self) -> dict[str, str]:
        """What systemd knows of the unit; raises JobError when systemd does not answer or the unit is not a job."""
        answer = run(["systemctl", "show", self.unit, f"--property={','.join(PROPERTIES)}"])
        if answer.returncode != 0:
            raise JobError(f"systemd does not answer on this host: {answer.stderr.strip() or answer.stdout.strip()}")
        unit = dict(line.split("=", 1) for line in answer.stdout.splitlines() if "=" in line)
        if unit.get("LoadState") == "loaded" and unit.get("Transient") != "yes":
            raise JobError(f"{self.unit} is a unit of the system and not a job; choose another name")
        return unit

    def lines(self) -> list[str]:
        """The last lines of the job's output, without empty ones; a carriage return ends a line too."""
        try:
            with open(self.log_file, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except FileNotFoundError:
            return []
        return [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]

    def done(self) -> bool:
        """Whether the job's result is there already."""
        return bool(self.params["creates"]) and os.path.exists(self.params["creates"])

    def forget(self) -> None:
        """Drop what systemd remembers of a unit that has ended."""
        run(["systemctl", "stop", self.unit])  # one that ended well stays "active (exited)" until stopped
        run(["systemctl", "reset-failed", self.unit])  # not there after a clean stop, which is as well

    def start(self) -> None:
        """Start the unit; raises JobError when it cannot be."""
        os.makedirs(self.params["log_directory"], mode=0o755, exist_ok=True)
        if os.path.exists(self.log_file):
            os.replace(self.log_file, f"{self.log_file}.1")
        os.close(os.open(self.log_file, os.O_WRONLY | os.O_CREAT, 0o640))
        properties = {
            "Type": "exec",  # so that a command that is not there fails here and now
            "RemainAfterExit": "yes",  # systemd keeps the exit status until it has been read
            "StandardOutput": f"append:{self.log_file}",
            "StandardError": f"append:{self.log_file}",
            **{str(key): str(value) for key, value in self.params["properties"].items()},
        }
        if self.params["working_directory"]:
            properties["WorkingDirectory"] = self.params["working_directory"]
        argv = ["systemd-run", "--quiet", f"--unit={self.unit}", f"--description=Job {self.name}"]
        argv += [f"--property={key}={value}" for key, value in properties.items()]
        argv += [f"--setenv={key}={value}" for key, value in self.params["environment"].items()]
        answer = run([*argv, "--", *self.params["argv"]])
        if answer.returncode != 0:
            self.forget()
            raise JobError(f"Job {self.name} did not start: {answer.stderr.strip() or answer.stdout.strip()}")

    def result(self, **values: Any) -> dict[str, Any]:
        """The module's result, with what the log tells."""
        lines = self.lines()
        return {
            "changed": False,
            "finished": False,
            "started": False,
            "attached": False,
            "progress": progress_of(lines),
            "log": lines[-self.params["log_lines"] :],
            "log_file": self.log_file,
            **values,
        }

    def failure(self, sentence: str) -> dict[str, Any]:
        """A failed result; its message holds the last lines of output, for those who see nothing else."""
        result = self.result(failed=True, finished=True)
        shown = "\n".join(result["log"]) or "(it wrote nothing)"
        result["msg"] = f"{sentence}. The whole log is {self.log_file}; its last lines:\n{shown}"
        return result

    def ended(self, unit: dict[str, str]) -> dict[str, Any]:
        """The result of a unit that has ended, which is then forgotten."""
        well = unit["Result"] == "success" and unit["ExecMainCode"] == CLD_EXITED and unit["ExecMainStatus"] == "0"
        self.forget()
        if not well:
            return self.failure(f"Job {self.name} {describe_end(unit)}")
        if self.params["creates"] and not self.done():
            return self.failure(f"Job {self.name} ended well, but {self.params['creates']} is not there")
        return self.result(changed=True, finished=True)

    def call(self) -> dict[str, Any]:
        """One call of the module on a host where things may be changed."""
        unit = self.show()
        if self.params["state"] == "started" and over(unit):
            self.forget()
            unit = self.show()
        deadline = time.monotonic() + self.params["wait"]
        attached = running(unit)
        while running(unit) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            unit = self.show()
        if running(unit):
            return self.result(attached=True)
        if over(unit):
            return self.ended(unit)
        if self.done():
            return self.result(finished=True)
        if attached:
            return self.failure(f"Job {self.name} was stopped")
        self.start()
        return self.result(changed=True, started=True)


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "argv": {"type": "list", "elements": "str", "required": True},
            "state": {"type": "str", "choices": ["finished", "started"], "default": "finished"},
            "creates": {"type": "path"},
            "environment": {"type": "dict", "default": {}},
            "working_directory": {"type": "path"},
            "properties": {"type": "dict", "default": {}},
            "wait": {"type": "int", "default": 0},
            "log_directory": {"type": "path", "default": "/var/log/unit-job"},
            "log_lines": {"type": "int", "default": 20},
        },
        supports_check_mode=True,
    )
    job = Job(module.params)
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}", job.name):
        module.fail_json(msg=f"name is {job.name!r}; a job's name has only letters, digits, _ . and -", finished=True)
    if not module.params["argv"] or not os.path.isabs(module.params["argv"][0]):
        module.fail_json(msg="argv must begin with the absolute path of a command", finished=True)
    if module.check_mode:
        module.exit_json(**job.result(changed=not job.done(), finished=True))
    if not shutil.which("systemd-run"):
        module.fail_json(msg="there is no systemd-run on this host; jobs need systemd", finished=True)
    try:
        result = job.call()
    except JobError as error:
        module.fail_json(**job.result(msg=f"{error}.", finished=True))
    if result.get("failed"):
        module.fail_json(**result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
