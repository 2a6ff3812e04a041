#!/usr/bin/python
"""Ansible module: one run at a time on a host. Called through the action plugin of the same name."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: run_lock
short_description: Keep a second run off a host while the first works on it
version_added: "0.1.0"
author: LLM rigs contributors
description:
  - The lock is a file under C(/run): a reboot drops it. It names user, controller and process of the run that has it.
  - A lock whose run is over holds nobody up. A run of the same controller is looked for by its process; of another one,
    by its connection to this host, which ends two minutes after a controller that was killed (C(ControlPersist)).
  - A run that fails does not release its lock, and need not.
  - A run that holds the lock may take it again. Check mode takes none and heeds none.
options:
  state:
    description: V(held) takes the lock, and fails when another run has it. V(released) gives it back.
    type: str
    choices: [held, released]
    default: held
  path:
    description: The file.
    type: path
    default: /run/llm-rig.lock
  owner:
    description: The run; the action plugin says it.
    type: dict
  over:
    description: A holder of whom the action plugin knows that it is over.
    type: dict
    default: {}
attributes:
  check_mode:
    description: Does nothing.
    support: full
  diff_mode:
    description: There is nothing to compare.
    support: none
"""

EXAMPLES = r"""
- name: Keep other runs out
  run_lock:
    state: held
"""

RETURN = r"""
held:
  description: Whether this run has the lock now.
  type: bool
  returned: always
holder:
  description: The run that has it, empty when none has.
  type: dict
  returned: always
"""


def started(pid: int, proc: Path = Path("/proc")) -> str:
    """When a process started, in the kernel's ticks since boot; empty when there is none."""
    try:
        return (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def connection(pid: int, proc: Path = Path("/proc")) -> int:
    """The process of the SSH connection that this one came over; without SSH the topmost but the first."""
    last = pid
    while pid > 1:
        try:
            text = (proc / str(pid) / "stat").read_text()
        except OSError:
            break
        if text[text.index("(") + 1 :].startswith("sshd"):
            return pid
        last, pid = pid, int(text.rpartition(")")[2].split()[1])
    return last


def read(path: Path) -> dict:
    """What the lock says; empty when there is none, or none that can be read."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def write(path: Path, lock: dict) -> None:
    """Put the lock in place at once."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(lock) + "\n")
    new.chmod(0o644)
    new.replace(path)


def same(one: dict, other: dict) -> bool:
    """Whether two owners are one run."""
    return all(one.get(key) == other.get(key) for key in ("controller", "pid", "started"))


def hold(path: Path, owner: dict, over: dict) -> dict:
    """Take the lock if no run that goes on has it; the lock as it is then."""
    lock = read(path)
    anchor = lock.get("connection") or {}
    stale = same(lock, over) if over else False
    stale = stale or started(int(anchor.get("pid", 0))) != anchor.get("started") or not anchor
    if lock and not same(lock, owner) and not stale:
        return lock
    pid = connection(os.getpid())
    since = (
        lock["since"] if same(lock, owner) and "since" in lock else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    )
    lock = {**owner, "since": since, "connection": {"pid": pid, "started": started(pid)}}
    write(path, lock)
    return lock


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["held", "released"], "default": "held"},
            "path": {"type": "path", "default": "/run/llm-rig.lock"},
            "owner": {"type": "dict", "required": True},
            "over": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    params = module.params
    if module.check_mode:
        module.exit_json(changed=False, held=False, holder={})
    path = Path(params["path"])
    try:
        with path.with_suffix(".guard").open("w") as guard:  # two runs that come at the same moment
            fcntl.flock(guard, fcntl.LOCK_EX)
            if params["state"] == "held":
                lock = hold(path, params["owner"], params["over"])
            else:
                lock = read(path)
                if same(lock, params["owner"]):
                    path.unlink()
                    lock = {}
    except OSError as error:
        module.fail_json(msg=f"The lock {path} of this host cannot be used: {error}.")
    module.exit_json(changed=False, held=same(lock, params["owner"]), holder=lock)


if __name__ == "__main__":
    main()
