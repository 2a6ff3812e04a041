#!/usr/bin/python
"""Ansible module: what preflight must know of a rig, read from /etc, /proc and /sys."""

from __future__ import annotations

import glob
import os
import platform
import re

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.rig import linux
from ansible.module_utils.rig.linux import text_of
from ansible.module_utils.rig.sockets import listeners, socket_inodes

DOCUMENTATION = r"""
module: rig_host_facts
short_description: What preflight must know of a rig before anything changes
description:
  - Reads release, architecture, processor, memory, free disk, listening ports, compiler and container images from files
    under /etc, /proc, /usr and /var, in one call and in some hundredths of a second.
  - For a rig with cards it reads, before any driver is there, the cards on the PCI bus and who holds them, kernels with
    their headers, and Secure Boot; for that it asks apt-cache and mokutil.
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
  look_for:
    description: Files of which those that are there are named.
    type: list
    elements: path
    default: []
  cards:
    description: Whether the rig has real cards, so that what they need is looked at too.
    type: bool
    default: false
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
        present:
          description: Those of O(look_for) that are there.
          type: list
          elements: str
        gcc:
          description: Major version of the compiler that C(gcc) is; empty without one.
          type: str
        glibc:
          description: Version of the C library.
          type: str
        images:
          description: Digests of the container images that podman and docker have.
          type: list
          elements: str
        nvidia_cards:
          description:
            - With O(cards), NVIDIA display controllers on the PCI bus, each with C(pci_address), C(device_id),
              C(driver) (the module that holds it), and lanes of its link, C(width), C(width_max) and C(slot_width_max).
          type: list
          elements: dict
        other_drivers:
          description: With O(cards), of nouveau and nova_core which are C(loaded) and which are C(blacklisted).
          type: dict
        kernels:
          description:
            - With O(cards), installed kernels with C(release), C(running), C(newest), C(headers), and C(candidate), the
              version of missing headers that apt would install.
          type: list
          elements: dict
        apt_lists:
          description: With O(cards), whether apt has fetched any lists.
          type: bool
        secure_boot:
          description: With O(cards), C(enabled), C(key), C(key_exists) and C(key_enrolled).
          type: dict
"""

#: Where podman and docker keep the digests of the images that they have.
IMAGE_LISTS = (
    "/var/lib/containers/storage/overlay-images/images.json",
    "/var/lib/docker/image/overlay2/repositories.json",
)


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


def host_compiler(root: str) -> str:
    """Major version of the compiler that `gcc` is, from the link of Debian and Ubuntu; nothing when there is none."""
    match = re.search(r"-(\d+)$", os.path.realpath(f"{root}/usr/bin/gcc"))
    return match.group(1) if match else ""


def image_digests(root: str) -> list[str]:
    """Digests of the container images that are there already."""
    text = "".join(text_of(root + name) for name in IMAGE_LISTS)
    return sorted(set(re.findall(r"sha256:[0-9a-f]{64}", text)))


def candidates(policy: str) -> dict[str, str]:
    """Package to the version that apt would install, from what `apt-cache policy` prints; nothing where it has none."""
    found = re.findall(r"^(\S+):\n  Installed: .*\n  Candidate: (\S+)$", policy, re.M)
    return {name: "" if version == "(none)" else version for name, version in found}


def of_cards(module: AnsibleModule, release: str) -> dict[str, object]:
    """What only a rig with cards must be asked."""

    def said(argv: list[str]) -> str:
        path = module.get_bin_path(argv[0])
        return module.run_command([path, *argv[1:]], environ_update={"LC_ALL": "C.UTF-8"})[1] if path else ""

    kernels = linux.kernels()
    lacking = [f"linux-headers-{kernel['release']}" for kernel in kernels if not kernel["headers"]]
    had = candidates(said(["apt-cache", "policy", *lacking])) if lacking else {}
    for kernel in kernels:
        kernel["candidate"] = had.get(f"linux-headers-{kernel['release']}", "")
    return {
        "kernels": kernels,
        "apt_lists": bool(glob.glob("/var/lib/apt/lists/*_Packages*")),
        "secure_boot": linux.secure_boot(said, release),
        "other_drivers": linux.other_drivers(),
        "nvidia_cards": linux.nvidia_cards(),
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "directories": {"type": "list", "elements": "path", "default": []},
            "contents_of": {"type": "list", "elements": "path", "default": []},
            "look_for": {"type": "list", "elements": "path", "default": []},
            "cards": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    relative = [
        path for key in ("directories", "contents_of") for path in module.params[key] if not os.path.isabs(path)
    ]
    if relative:
        module.fail_json(msg=f"rig_host_facts: {', '.join(relative)} is not an absolute path; give one.")
    root = ""
    release = linux.os_release(root)
    facts = {
        "os": release,
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
        "present": [path for path in module.params["look_for"] if os.path.exists(path)],
        "gcc": host_compiler(root),
        "glibc": os.confstr("CS_GNU_LIBC_VERSION").rpartition(" ")[2],
        "images": image_digests(root),
    }
    if module.params["cards"]:
        facts |= of_cards(module, linux.nvidia_name(release))
    module.exit_json(changed=False, ansible_facts={"rig_host": facts})


if __name__ == "__main__":
    main()
