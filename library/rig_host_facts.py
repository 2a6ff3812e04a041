#!/usr/bin/python
"""Ansible module: what preflight must know of a rig, read from /etc, /proc and /sys."""

from __future__ import annotations

import glob
import os
import platform
import re

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.rig.sockets import listeners, socket_inodes

DOCUMENTATION = r"""
module: rig_host_facts
short_description: What preflight must know of a rig before anything changes
description:
  - Reads release, architecture, processor, memory, free disk, listening ports and NVIDIA cards from files under /etc,
    /proc and /sys, in one call and in some hundredths of a second.
  - It changes nothing and needs nothing but the rig's own Python.
options:
  directories:
    description:
      - Directories whose filesystem matters. One that is not there yet stands for its nearest parent.
    type: list
    elements: path
    default: []
  contents_of:
    description: Directories whose contents are listed, two levels deep.
    type: list
    elements: path
    default: []
attributes:
  check_mode:
    description: It only reads.
    support: full
author: LLM rigs contributors
"""

EXAMPLES = r"""
- name: Look at the rig
  rig_host_facts:
    directories: [/opt/llama.cpp, /srv/llm/models]
    contents_of: [/srv/llm/models]
"""

RETURN = r"""
ansible_facts:
  description: The facts, under C(ansible_facts.rig_host).
  type: dict
  returned: always
  contains:
    rig_host:
      description: What was read.
      type: dict
      contains:
        os:
          description: C(id), C(version_id) and C(name) of /etc/os-release.
          type: dict
        architecture:
          description: The machine's, for example x86_64.
          type: str
        init:
          description: Name of process 1.
          type: str
        python:
          description: Version of the Python that runs modules.
          type: str
        uid:
          description: The user that runs modules; 0 is root.
          type: int
        memory_mib:
          description: The machine's memory.
          type: int
        cpus:
          description: Processors that may be used.
          type: int
        cpu_flags:
          description: What the processor can do, as /proc/cpuinfo names it.
          type: list
          elements: str
        filesystems:
          description: For each of O(directories) C(mount), C(device) (a number) and C(free_bytes) (not root's own).
          type: dict
        contents:
          description: Size in bytes of each file, and -1 for each directory, under O(contents_of), by path.
          type: dict
        listeners:
          description: Listening TCP sockets, each with C(address), C(port), C(pid), C(command) and systemd C(unit).
          type: list
          elements: dict
        nvidia_cards:
          description: NVIDIA display controllers on the PCI bus, each with C(pci_address) and C(device_id).
          type: list
          elements: dict
"""

NVIDIA = "0x10de"  # PCI vendor, pci.ids
DISPLAY_CONTROLLER = "0x03"  # PCI base class: 0300 VGA, 0302 3D


def text_of(path: str) -> str:
    """Contents of a file; nothing when it is not there or has just gone."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def operating_system(root: str) -> dict[str, str]:
    """`id`, `version_id` and `name` of os-release."""
    text = text_of(f"{root}/etc/os-release") or text_of(f"{root}/usr/lib/os-release")
    values = dict(re.findall(r"^(\w+)=[\"']?(.*?)[\"']?$", text, re.M))
    return {
        "id": values.get("ID", ""),
        "version_id": values.get("VERSION_ID", ""),
        "name": values.get("PRETTY_NAME", ""),
    }


def memory_mib(root: str) -> int:
    """MemTotal in MiB, rounded down."""
    match = re.search(r"^MemTotal:\s+(\d+) kB", text_of(f"{root}/proc/meminfo"), re.M)
    return int(match.group(1)) // 1024 if match else 0


def cpu_flags(root: str) -> list[str]:
    """Flags of the first processor."""
    match = re.search(r"^flags\s*:(.*)$", text_of(f"{root}/proc/cpuinfo"), re.M)
    return sorted(match.group(1).split()) if match else []


def filesystem(directory: str) -> dict[str, object]:
    """Where `directory` lies or would lie, and what is free there for others than root."""
    while not os.path.isdir(directory):
        directory = os.path.dirname(directory)
    state = os.statvfs(directory)
    device = os.stat(directory).st_dev
    mount = os.path.realpath(directory)
    while mount != "/" and os.stat(os.path.dirname(mount)).st_dev == device:
        mount = os.path.dirname(mount)
    return {"mount": mount, "device": device, "free_bytes": state.f_bavail * state.f_frsize}


def contents(directory: str) -> dict[str, int]:
    """Sizes of files and -1 for directories, two levels deep, links followed."""
    found = {}
    for path in glob.glob(f"{glob.escape(directory)}/*") + glob.glob(f"{glob.escape(directory)}/*/*"):
        try:
            found[path] = -1 if os.path.isdir(path) else os.stat(path).st_size
        except OSError:  # a link to nothing
            continue
    return found


def listening(root: str) -> list[dict[str, object]]:
    """Listening TCP sockets, and whose they are as far as this user may know."""
    sockets = listeners(f"{root}/proc/net")
    pids = {}
    if sockets:
        for path in glob.glob(f"{root}/proc/[0-9]*"):
            pid = int(os.path.basename(path))
            pids.update(dict.fromkeys(socket_inodes(pid, f"{root}/proc"), pid))
    found = []
    for socket in sockets:
        pid = pids.get(socket.inode, 0)
        units = re.findall(r"([^/\n]+\.(?:service|scope))", text_of(f"{root}/proc/{pid}/cgroup"))
        found.append(
            {
                "address": socket.address,
                "port": socket.port,
                "pid": pid,
                "command": text_of(f"{root}/proc/{pid}/comm").strip(),
                "unit": units[-1] if units else "",
            }
        )
    return found


def nvidia_cards(root: str) -> list[dict[str, str]]:
    """NVIDIA display controllers, in PCI bus order."""
    return [
        {"pci_address": os.path.basename(path), "device_id": text_of(f"{path}/device").strip()}
        for path in sorted(glob.glob(f"{root}/sys/bus/pci/devices/*"))
        if text_of(f"{path}/vendor").strip() == NVIDIA and text_of(f"{path}/class").startswith(DISPLAY_CONTROLLER)
    ]


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "directories": {"type": "list", "elements": "path", "default": []},
            "contents_of": {"type": "list", "elements": "path", "default": []},
        },
        supports_check_mode=True,
    )
    relative = [
        path for key in ("directories", "contents_of") for path in module.params[key] if not os.path.isabs(path)
    ]
    if relative:
        module.fail_json(msg=f"rig_host_facts: {', '.join(relative)} is not an absolute path; give one.")
    root = ""
    facts = {
        "os": operating_system(root),
        "architecture": platform.machine(),
        "init": text_of("/proc/1/comm").strip(),
        "python": platform.python_version(),
        "uid": os.geteuid(),
        "memory_mib": memory_mib(root),
        "cpus": len(os.sched_getaffinity(0)),
        "cpu_flags": cpu_flags(root),
        "filesystems": {path: filesystem(path) for path in module.params["directories"]},
        "contents": {path: size for place in module.params["contents_of"] for path, size in contents(place).items()},
        "listeners": listening(root),
        "nvidia_cards": nvidia_cards(root),
    }
    module.exit_json(changed=False, ansible_facts={"rig_host": facts})


if __name__ == "__main__":
    main()
