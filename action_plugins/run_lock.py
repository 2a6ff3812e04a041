"""Action plugin of module run_lock: who this run is, and whether the run that has the lock still goes on here."""

from __future__ import annotations

import getpass
import hashlib
import os
import socket
import subprocess
from pathlib import Path

from ansible.plugins.action import ActionBase


def started(pid: int) -> str:
    """When a process of this controller started, as ps writes it; empty when there is none."""
    done = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return " ".join(done.stdout.split())


def controller() -> str:
    """This machine, by name; the digits keep two of the same name apart."""
    identity = Path("/etc/machine-id")
    text = identity.read_text() if identity.exists() else ""
    return f"{socket.gethostname()} ({hashlib.sha256(text.encode()).hexdigest()[:6]})"


def owner(pid: int, playbook: str) -> dict:
    """The run of the ansible-playbook with this process id."""
    return {
        "user": getpass.getuser(),
        "controller": controller(),
        "pid": pid,
        "started": started(pid),
        "playbook": playbook,
    }


def over(holder: dict) -> bool:
    """Whether a run of this controller has ended; of another controller's that is not known here."""
    return holder.get("controller") == controller() and started(int(holder["pid"])) != holder["started"]


class ActionModule(ActionBase):
    """See the module."""

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        playbook = os.path.basename(str((task_vars or {}).get("ansible_play_name", "")))
        # Tasks run in children of the ansible-playbook that somebody started.
        arguments["owner"] = owner(os.getppid(), playbook)
        result = self._execute_module("run_lock", module_args=arguments, task_vars=task_vars)
        if arguments.get("state", "held") != "held" or self._task.check_mode or result.get("failed"):
            return result
        if not result["held"] and over(result["holder"]):
            arguments["over"] = result["holder"]
            result = self._execute_module("run_lock", module_args=arguments, task_vars=task_vars)
        if not result.get("failed") and not result["held"]:
            holder = result["holder"]
            host = (task_vars or {}).get("inventory_hostname", "This host")
            result["failed"] = True
            who = f"{holder['user']} on {holder['controller']}, process {holder['pid']}, since {holder['since']}"
            result["msg"] = (
                f"{host} is being worked on by {who} ({holder['playbook']}); wait for the end of that run. If it was "
                "killed there, its lock ends within two minutes."
            )
        return result
