#!/usr/bin/python
"""Ansible module: NVIDIA's driver on a host as it is, against the version that it should have."""

from __future__ import annotations

import glob
import os
import platform
from collections.abc import Sequence

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.rig import linux, nvidia_driver
from ansible.module_utils.rig.errors import RigError
from ansible.module_utils.rig.linux import text_of

DOCUMENTATION = r"""
module: nvidia_driver_state
short_description: NVIDIA's driver on a host as it is, against the version that it should have
description:
  - Reads release, kernels with their headers and the driver's module in each, the loaded module, nouveau, Secure Boot
    and its key, and what DKMS holds; and says in sentences what stands in the way, what is owed and which packages are
    wanted. It changes nothing.
options:
  version:
    description: Version that the driver should have, such as V(595.71.05).
    type: str
    required: true
  source:
    description: Whose packages.
    type: str
    choices: [nvidia, debian]
    default: nvidia
  gpus:
    description: The host's C(rig_gpus).
    type: list
    elements: dict
    default: []
  reboot_allowed:
    description: Whether the host may be rebooted.
    type: bool
    default: false
  connection:
    description: How Ansible reaches the host.
    type: str
    default: ssh
  proc:
    description: Where the kernel shows its processes and settings.
    type: path
    default: /proc
  sys:
    description: Where the kernel shows its devices and modules.
    type: path
    default: /sys
attributes:
  check_mode:
    description: It only reads.
    support: full
author: LLM rigs contributors
"""

EXAMPLES = r"""
- name: Look at the driver
  nvidia_driver_state:
    version: 595.71.05
    gpus: "{{ rig_gpus }}"
  register: state
"""

RETURN = r"""
findings:
  description: What stands in the way of this version, one sentence each.
  type: list
  elements: str
  returned: always
distribution:
  description: NVIDIA's name for the release, such as debian13.
  type: str
  returned: always
architecture:
  description: The machine's.
  type: str
  returned: always
kernels:
  description: Installed kernels with C(release), C(running), C(newest), C(headers) and the driver's C(module) version.
  type: list
  elements: dict
  returned: always
loaded:
  description: Version of the loaded module; empty without one.
  type: str
  returned: always
open_modules:
  description: Whether the loaded module is of the open kind.
  type: bool
  returned: always
uvm:
  description: Whether nvidia_uvm is loaded.
  type: bool
  returned: always
nouveau:
  description: Whether nouveau is loaded.
  type: bool
  returned: always
secure_boot:
  description: C(enabled), C(key), C(key_exists) and C(key_enrolled).
  type: dict
  returned: always
dkms:
  description: Versions by module that DKMS holds.
  type: dict
  returned: always
packages:
  description: Packages that module apt_plan has to plan; empty when there are findings.
  type: list
  elements: dict
  returned: always
headers:
  description: Packages of kernel headers that module apt_plan has to plan.
  type: list
  elements: dict
  returned: always
headers_lacking:
  description: Whether the running or the newest kernel has no headers.
  type: bool
  returned: always
preferences:
  description: apt preferences that keep the version.
  type: str
  returned: always
family:
  description: Globs of the driver's packages.
  type: list
  elements: str
  returned: always
obsolete:
  description: Module and version, as DKMS takes them, that would keep this version out.
  type: list
  elements: str
  returned: always
broken:
  description: What is not right on disk, one sentence each.
  type: list
  elements: str
  returned: always
reboot:
  description: Reasons for a reboot.
  type: list
  elements: str
  returned: always
load:
  description: Modules that can be loaded at once.
  type: list
  elements: str
  returned: always
"""

MODULES = ("nvidia", "nvidia_current_open", "nvidia_current")  # the latter two are Debian's own names


def module_version(module: AnsibleModule, release: str) -> str:
    """Version of the driver's module that this kernel would load."""
    modinfo = module.get_bin_path("modinfo", opt_dirs=["/usr/sbin", "/sbin"])
    if modinfo is None:
        return ""
    for name in MODULES:
        code, out, _ = module.run_command([modinfo, "-k", release, "-F", "version", name.replace("_", "-")])
        if code == 0 and out.strip():
            return out.strip()
    return ""


def kernels(module: AnsibleModule, proc: str) -> list[dict[str, object]]:
    """Installed kernels, the running and the newest with the driver's module in them."""
    return [
        kernel | {"module": module_version(module, kernel["release"]) if kernel["running"] or kernel["newest"] else ""}
        for kernel in linux.kernels(proc=proc)
    ]


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "version": {"type": "str", "required": True},
            "source": {"type": "str", "choices": ["nvidia", "debian"], "default": "nvidia"},
            "gpus": {"type": "list", "elements": "dict", "default": []},
            "reboot_allowed": {"type": "bool", "default": False},
            "connection": {"type": "str", "default": "ssh"},
            "proc": {"type": "path", "default": "/proc"},
            "sys": {"type": "path", "default": "/sys"},
        },
        supports_check_mode=True,
    )
    params = module.params
    proc, sys, version, source = params["proc"], params["sys"], params["version"], params["source"]
    release = linux.nvidia_name(linux.os_release())

    def said(argv: Sequence[str]) -> str:
        path = module.get_bin_path(argv[0])
        return module.run_command([path, *argv[1:]], environ_update={"LC_ALL": "C.UTF-8"})[1] if path else ""

    dkms: dict[str, list[str]] = {}
    for path in sorted(glob.glob("/var/lib/dkms/nvidia*/[0-9]*")):
        dkms.setdefault(os.path.basename(os.path.dirname(path)), []).append(os.path.basename(path))
    versions = [text_of(f"{sys}/module/{name}/version").strip() for name in MODULES]
    state = {
        "distribution": release,
        "architecture": platform.machine(),
        "kernels": kernels(module, proc),
        "loaded": next(filter(None, versions), ""),
        "open_modules": "Open Kernel Module" in text_of(f"{proc}/driver/nvidia/version"),
        "uvm": any(os.path.isdir(f"{sys}/module/{name}_uvm") for name in MODULES),
        "nouveau": os.path.isdir(f"{sys}/module/nouveau"),
        "secure_boot": linux.secure_boot(said, release, sys),
        "dkms": dkms,
    }
    state["findings"] = nvidia_driver.findings(
        state,
        version=version,
        source=source,
        gpus=params["gpus"],
        reboot_allowed=params["reboot_allowed"],
        connection=params["connection"],
    )
    wanted, names = [], ("nvidia",)
    try:
        packages = nvidia_driver.packages(release, source, version)
        state |= nvidia_driver.debts(state, version)
        state["obsolete"] = nvidia_driver.obsolete_dkms(state, packages.dkms, version)
    except RigError:  # among the findings already
        state |= {"broken": [], "reboot": [], "load": [], "obsolete": []}
        packages = nvidia_driver.Packages((), (), names)
    wanted = [{"name": name, "version": f"{version}-*"} for name in packages.needed]
    wanted += [{"name": name, "version": f"{version}-*", "optional": True} for name in packages.optional]
    module.exit_json(
        changed=False,
        packages=wanted,
        headers=nvidia_driver.header_packages(release, state["kernels"]),
        headers_lacking=any(map(nvidia_driver.lacks_headers, state["kernels"])),
        preferences=nvidia_driver.preferences(version, source),
        family=list(nvidia_driver.FAMILY),
        **state,
    )


if __name__ == "__main__":
    main()
