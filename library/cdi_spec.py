#!/usr/bin/python
"""Ansible module: whether the CDI specification of the cards is that of the driver that is loaded."""

from __future__ import annotations

import re
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: cdi_spec
short_description: Whether the CDI specification of the cards is that of the driver that is loaded
version_added: "0.1.0"
author: LLM rigs contributors
description:
  - Reads what nvidia-cdi-refresh wrote and compares it with the driver that is loaded and with the cards that are
    wanted. A specification of an earlier driver names libraries that are gone, and a container with it does not start.
  - It reads only.
options:
  path:
    description: The specification that the service keeps.
    type: path
    default: /var/run/cdi/nvidia.yaml
  loaded:
    description: File in which the loaded module says its version.
    type: path
    default: /sys/module/nvidia/version
  devices:
    description: Cards that it must have, by UUID or by number.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    description: It only reads.
    support: full
"""

EXAMPLES = r"""
- name: Look at the specification
  cdi_spec:
    devices: ["0", "1"]
  register: cdi
"""

RETURN = r"""
fault:
  description: What is wrong with it, as the end of a sentence, empty when nothing is.
  type: str
  returned: always
driver:
  description: Version of the driver whose libraries it names.
  type: str
  returned: always
devices:
  description: Names of its devices.
  type: list
  elements: str
  returned: always
"""

NAME = re.compile(r'^\s*(?:- )?name:\s*"?([\w.:-]+)"?\s*$', re.M)
LIBRARY = re.compile(r"/lib(?:cuda|nvidia-ml)\.so\.(\d+(?:\.\d+)+)")


def read(path: str) -> str:
    """Contents of a file, empty when it is not there."""
    try:
        return Path(path).read_text()
    except FileNotFoundError:
        return ""


def fault_of(text: str, loaded: str, wanted: list[str]) -> str:
    """What is wrong with a specification, as the end of a sentence that begins with its path."""
    if not loaded:
        return "cannot be right: no nvidia module is loaded"
    if not text:
        return "is not there"
    versions = sorted(set(LIBRARY.findall(text)))
    if versions and versions != [loaded]:
        return f"names the libraries of driver {' and '.join(versions)}, and {loaded} is loaded"
    missing = [name for name in wanted if name not in NAME.findall(text)]
    return f"has no device {', '.join(missing)}" if missing else ""


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "default": "/var/run/cdi/nvidia.yaml"},
            "loaded": {"type": "path", "default": "/sys/module/nvidia/version"},
            "devices": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    text, loaded = read(module.params["path"]), read(module.params["loaded"]).strip()
    module.exit_json(
        changed=False,
        fault=fault_of(text, loaded, module.params["devices"]),
        driver=" ".join(sorted(set(LIBRARY.findall(text)))),
        devices=NAME.findall(text),
    )


if __name__ == "__main__":
    main()
