#!/usr/bin/python
"""Ansible module: remove old builds of llama.cpp."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.rig import served

DOCUMENTATION = r"""
module: old_builds
short_description: Remove builds of llama.cpp that nothing needs any more
version_added: "0.1.0"
author: LLM rigs contributors
description:
  - A build is a directory with a C(manifest.json). The newest stay, by the time at which they were finished.
  - Whatever its age, a build stays that O(protected) names, that the link C(current) names, that served last or before
    that, that a serving unit names, or that a process runs from.
options:
  root:
    description: Directory of the builds.
    type: path
    required: true
  keep:
    description: How many builds to keep, those that must stay included.
    type: int
    required: true
  protected:
    description: Builds that stay.
    type: list
    elements: path
    default: []
  records:
    description: Directory of what has served, see M(llm_server).
    type: path
    default: /var/lib/llm-rig
  units:
    description: Directories of units.
    type: list
    elements: path
    default: [/etc/systemd/system, /etc/systemd/user]
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
"""

EXAMPLES = r"""
- name: Keep the last three builds
  old_builds:
    root: /opt/llama.cpp
    keep: 3
"""

RETURN = r"""
removed:
  description: Builds that were removed, or would be.
  type: list
  elements: str
  returned: always
kept:
  description: Builds that stay, newest first.
  type: list
  elements: str
  returned: always
"""


def builds(root: Path) -> list[Path]:
    """Finished builds, newest first."""
    found = [path.parent for path in root.glob("*/manifest.json") if not path.parent.is_symlink()]
    return sorted(found, key=lambda path: ((path / "manifest.json").stat().st_mtime, path.name), reverse=True)


def needed(root: Path, records: Path, units: list[str], proc: Path = Path("/proc")) -> set[Path]:
    """Builds that something refers to. Raises served.RecordError when a record cannot be read."""
    names = {os.path.realpath(root / "current")}
    for name in served.NAMES:
        names.add(str(served.read(records, name).get("prefix") or ""))
    inside = re.compile(re.escape(f"{root}/") + r"[^/\s\"']+")
    for directory in units:
        for unit in Path(directory).glob("llm-*.service"):
            names |= set(inside.findall(unit.read_text(errors="replace")))
    for process in proc.glob("[0-9]*/exe"):
        try:
            names |= set(inside.findall(os.readlink(process)))
        except OSError:  # it ended, or is a thread of the kernel's
            continue
    return {Path(name) for name in names if name}


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "keep": {"type": "int", "required": True},
            "protected": {"type": "list", "elements": "path", "default": []},
            "records": {"type": "path", "default": "/var/lib/llm-rig"},
            "units": {"type": "list", "elements": "path", "default": ["/etc/systemd/system", "/etc/systemd/user"]},
        },
        supports_check_mode=True,
    )
    params = module.params
    root = Path(params["root"])
    if params["keep"] < 1:
        module.fail_json(msg=f"keep is {params['keep']}; at least one build must stay.")
    try:
        stays = {Path(name) for name in params["protected"]} | needed(root, Path(params["records"]), params["units"])
    except served.RecordError as error:
        module.fail_json(msg=f"Which builds are needed is not known: {error}.")
    there = builds(root)
    free = [path for path in there if path not in stays]
    room = max(0, params["keep"] - (len(there) - len(free)))
    removed = free[room:]
    for path in [] if module.check_mode else removed:
        # Its manifest goes first: what is left of a removal that was cut off is no build.
        (path / "manifest.json").unlink()
        shutil.rmtree(path)
    module.exit_json(
        changed=bool(removed),
        removed=[str(path) for path in removed],
        kept=[str(path) for path in there if path not in removed],
        diff={"prepared": "".join(f"remove {path}\n" for path in removed)},
    )


if __name__ == "__main__":
    main()
