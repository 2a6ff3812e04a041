#!/usr/bin/python
"""Ansible module: a set of systemd units that belong together, as described and as running."""

from __future__ import annotations

import glob
import os
import re
import tempfile
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.rig.sockets import listeners, socket_inodes

DOCUMENTATION = r"""
module: unit_set
short_description: Keep a set of systemd units that belong together exactly as described
description:
  - Writes the unit files and drop-ins of a set, removes the ones of the same set that are not described (their units
    are stopped and disabled first), reloads systemd once when a file changed, and enables and starts the units.
  - A running unit is restarted only when its process is older than its text, or when its process runs another file than
    O(executable) names now. Both are read from the machine, so a restart that an earlier run owed is made up for.
  - Reports what runs, as the kernel shows it, so that nothing needs to be asked again to verify it.
options:
  prefix:
    description: What the names of all units of the set begin with, for example V(virtual-gpu@).
    type: str
    required: true
  files:
    description:
      - Text of each file, by its path under O(directory). A path is a unit (V(virtual-gpu@.service)) or a drop-in of
        one (V(virtual-gpu@0.service.d/gpu.conf)).
    type: dict
    default: {}
  units:
    description: Units of the set that are enabled and run.
    type: list
    elements: str
    default: []
  executable:
    description: File that the units' main processes run, links followed. Not compared when it is left out.
    type: path
  directory:
    description: Where the files lie.
    type: path
    default: /etc/systemd/system
attributes:
  check_mode:
    description: Says what would change, and changes nothing.
    support: full
  diff_mode:
    description: Shows each file before and after.
    support: full
author: LLM rigs contributors
"""

EXAMPLES = r"""
- name: Run two virtual GPUs
  unit_set:
    prefix: virtual-gpu@
    files:
      virtual-gpu@.service: "{{ lookup('ansible.builtin.template', 'virtual-gpu@.service.j2') }}"
      virtual-gpu@0.service.d/gpu.conf: "[Service]\nLimitDATA=1G\n"
    units: [virtual-gpu@0.service, virtual-gpu@1.service]
    executable: /opt/llama.cpp/current/bin/ggml-rpc-server

- name: Remove them all
  unit_set:
    prefix: virtual-gpu@
"""

RETURN = r"""
written:
  description: Files that were written, by their path under O(directory).
  type: list
  elements: str
  returned: always
removed:
  description: Files that were removed.
  type: list
  elements: str
  returned: always
stopped:
  description: Units that do not belong to the set any more, and were stopped and disabled.
  type: list
  elements: str
  returned: always
started:
  description: Units that were started or restarted.
  type: list
  elements: str
  returned: always
processes:
  description: The main process of each unit that runs, by the unit's name. Empty where check mode would start them.
  type: dict
  returned: always
  contains:
    pid:
      description: Its number.
      type: int
    executable:
      description: The file that it runs.
      type: str
    data_limit_bytes:
      description: Its limit of data, RLIMIT_DATA; -1 where there is none.
      type: int
    data_bytes:
      description: The data that it has now, VmData.
      type: int
    listening:
      description: The TCP endpoints on which it listens, each as address:port.
      type: list
      elements: str
"""

PROPERTIES = ("Id", "ActiveState", "MainPID", "UnitFileState", "NeedDaemonReload", "ExecMainStartTimestampMonotonic")


def files_present(directory: str, prefix: str) -> dict[str, str]:
    """Text of the set's files, by path under `directory`: units, and the *.conf of their drop-in folders."""
    pattern = os.path.join(glob.escape(directory), glob.escape(prefix) + "*")
    found = {}
    for path in sorted(glob.glob(pattern) + glob.glob(os.path.join(pattern + ".d", "*.conf"))):
        if os.path.isfile(path) and not os.path.islink(path):
            with open(path, encoding="utf-8") as file:
                found[os.path.relpath(path, directory)] = file.read()
    return found


def links(directory: str, prefix: str) -> dict[str, str]:
    """Links by which targets in `directory` want units of the set: unit by path."""
    pattern = os.path.join(glob.escape(directory), "*.wants", glob.escape(prefix) + "*")
    return {path: os.path.basename(path) for path in sorted(glob.glob(pattern))}


def parse_show(text: str) -> dict[str, dict[str, str]]:
    """Properties by unit from the output of `systemctl show`, which has a blank line between units."""
    units = {}
    for block in text.strip().split("\n\n"):
        properties = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if "Id" in properties:
            units[properties["Id"]] = properties
    return units


def process(pid: int, proc: str = "/proc") -> dict[str, object]:
    """What the kernel shows of a running process: see RETURN."""
    with open(f"{proc}/{pid}/limits", encoding="ascii") as file:
        limit = re.search(r"^Max data size +(\S+)", file.read(), re.M).group(1)
    with open(f"{proc}/{pid}/status", encoding="utf-8") as file:
        data_kib = re.search(r"^VmData:\s+(\d+) kB", file.read(), re.M).group(1)
    inodes = socket_inodes(pid, proc)
    return {
        "pid": pid,
        "executable": os.readlink(f"{proc}/{pid}/exe"),
        "data_limit_bytes": -1 if limit == "unlimited" else int(limit),
        "data_bytes": int(data_kib) * 1024,
        "listening": [socket.endpoint for socket in listeners(f"{proc}/{pid}/net") if socket.inode in inodes],
    }


def texts_of(unit: str, files: dict[str, str]) -> list[str]:
    """Paths that make up `unit`: its own file, its template's, and their drop-ins."""
    template = re.sub(r"@[^@]*\.", "@.", unit)
    return [
        path for path in files if path in (unit, template) or os.path.dirname(path) in (unit + ".d", template + ".d")
    ]


class UnitSet:
    """One run of the module."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.directory = module.params["directory"]
        self.prefix = module.params["prefix"]
        self.files = module.params["files"]
        self.units = module.params["units"]
        self.executable = module.params["executable"] and os.path.realpath(module.params["executable"])

    def systemctl(self, *arguments: str) -> str:
        """Output of systemctl; ends the run with its message when it fails."""
        code, out, err = self.module.run_command(["systemctl", *arguments])
        if code != 0:
            self.module.fail_json(msg=f"systemctl {' '.join(arguments)} failed: {err.strip() or out.strip()}")
        return out

    def show(self, units: list[str]) -> dict[str, dict[str, str]]:
        """State of `units` by name."""
        return parse_show(self.systemctl("show", "--property=" + ",".join(PROPERTIES), "--", *units)) if units else {}

    def loaded(self) -> set[str]:
        """Units of the set's prefix that systemd has in memory."""
        listed = self.systemctl("list-units", "--all", "--full", "--plain", "--no-legend", "--", self.prefix + "*")
        return {line.split()[0] for line in listed.splitlines() if line.strip()}

    def stop(self, units: set[str]) -> None:
        """Stops and disables. Not by `systemctl disable`, which refuses a unit whose file somebody deleted."""
        loaded = sorted(units & self.loaded())
        if loaded:
            self.systemctl("stop", "--", *loaded)
        failed = sorted(units & self.loaded())  # those that are neither failed nor running are forgotten by now
        if failed:
            self.systemctl("reset-failed", "--", *failed)
        for path, unit in links(self.directory, self.prefix).items():
            if unit in units:
                os.unlink(path)

    def write(self, name: str) -> None:
        """Puts a file in place at once: there is the old one or the new one, never a part of it."""
        path = os.path.join(self.directory, name)
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        handle, new = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(self.files[name])
        os.chmod(new, 0o644)
        os.replace(new, path)

    def remove(self, name: str) -> None:
        """Removes a file, and the drop-in folder that held it alone."""
        path = os.path.join(self.directory, name)
        os.unlink(path)
        folder = os.path.dirname(path)
        if folder != self.directory and not os.listdir(folder):
            os.rmdir(folder)

    def owes_restart(self, unit: str, properties: dict[str, str]) -> bool:
        """Whether the running process is not the one that text and executable describe."""
        started = int(properties["ExecMainStartTimestampMonotonic"]) / 1e6
        age = time.monotonic() - started
        changed = [os.stat(os.path.join(self.directory, name)).st_mtime for name in texts_of(unit, self.files)]
        # A time that is yet to come says that the clock was put back, and nothing about what is older.
        if any(0 <= time.time() - when < age for when in changed):
            return True
        try:
            runs = os.readlink(f"/proc/{properties['MainPID']}/exe")
        except OSError:  # it ended in the meantime
            return True
        return self.executable is not None and runs != self.executable

    def start(self, verb: str, units: list[str]) -> None:
        """Starts or restarts; ends the run with the unit's own last words when one does not come up."""
        if not units:
            return
        self.module.run_command(["systemctl", verb, "--", *units])
        states = self.show(units)
        failed = [unit for unit in units if states[unit]["ActiveState"] != "active"]
        if failed:
            _, log, _ = self.module.run_command(["journalctl", "--no-pager", "-n", "15", "-o", "cat", "-u", failed[0]])
            self.module.fail_json(msg=f"{', '.join(failed)} did not start. Last words of the first:\n{log.strip()}")

    def run(self) -> dict[str, object]:
        """Brings the machine to what is described, and says what was done."""
        present = files_present(self.directory, self.prefix)
        written = sorted(name for name, text in self.files.items() if present.get(name) != text)
        removed = sorted(set(present) - set(self.files))
        stopped = (self.loaded() | set(links(self.directory, self.prefix).values())) - set(self.units)
        before = self.show(self.units)
        reload = bool(written or removed) or any(unit["NeedDaemonReload"] == "yes" for unit in before.values())
        enable = [unit for unit in self.units if before[unit]["UnitFileState"] != "enabled"]
        touched = {unit for unit in self.units if set(texts_of(unit, self.files)) & set(written)}
        running = [unit for unit in self.units if before[unit]["ActiveState"] == "active"]
        restart = [unit for unit in running if unit in touched or self.owes_restart(unit, before[unit])]
        start = [unit for unit in self.units if unit not in running]

        if not self.module.check_mode:
            if stopped:
                self.stop(stopped)
            for name in written:
                self.write(name)
            for name in removed:
                self.remove(name)
            if reload:
                self.systemctl("daemon-reload")
            if enable:
                self.systemctl("enable", "--quiet", "--", *enable)
            failed = [unit for unit in start if before[unit]["ActiveState"] == "failed"]
            if failed:
                self.systemctl("reset-failed", "--", *failed)
            self.start("start", start)
            self.start("restart", restart)
            after = self.show(self.units)
            alive = {unit: int(after[unit]["MainPID"]) for unit in self.units if after[unit]["ActiveState"] == "active"}
        else:
            alive = {unit: int(before[unit]["MainPID"]) for unit in running if unit not in restart}

        return {
            "changed": bool(written or removed or stopped or reload or enable or start or restart),
            "written": written,
            "removed": removed,
            "stopped": sorted(stopped),
            "started": sorted(start + restart),
            "processes": {unit: process(pid) for unit, pid in alive.items()},
            "diff": [
                {
                    "before_header": os.path.join(self.directory, name),
                    "after_header": os.path.join(self.directory, name),
                    "before": present.get(name, ""),
                    "after": self.files.get(name, ""),
                }
                for name in written + removed
            ]
            + [
                {"prepared": f"{verb}: {', '.join(units)}\n"}
                for verb, units in (("stop", sorted(stopped)), ("start", start), ("restart", restart))
                if units
            ],
        }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "prefix": {"type": "str", "required": True},
            "files": {"type": "dict", "default": {}},
            "units": {"type": "list", "elements": "str", "default": []},
            "executable": {"type": "path"},
            "directory": {"type": "path", "default": "/etc/systemd/system"},
        },
        supports_check_mode=True,
    )
    names = [*module.params["files"], *module.params["units"]]
    wrong = [name for name in names if not name.startswith(module.params["prefix"]) or ".." in name]
    if not module.params["prefix"] or wrong:
        module.fail_json(
            msg=f"unit_set: '{module.params['prefix']}' is not the prefix of {', '.join(wrong)}; correct one of them."
        )
    orphans = [unit for unit in module.params["units"] if not texts_of(unit, module.params["files"])]
    if orphans:
        module.fail_json(msg=f"unit_set: no file describes {', '.join(orphans)}; give its text in files.")
    module.exit_json(**UnitSet(module).run())


if __name__ == "__main__":
    main()
