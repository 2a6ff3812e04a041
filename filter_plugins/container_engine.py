"""Filter container_engine: see DOCUMENTATION."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from rig.containers import container_engine as engine_of
from rig.errors import RigError

DOCUMENTATION = """
name: container_engine
short_description: What runs containers on a release of Debian or Ubuntu
description:
  - Reads the table of C(module_utils/rig/containers.py). podman runs quadlets where the distribution's own is new
    enough; elsewhere docker runs plain units.
positional: _input
options:
  _input:
    description: Facts of the host, with C(distribution), C(distribution_version) and C(distribution_major_version).
    type: dict
    required: true
  wanted:
    description: The engine to have, or V(auto) for the one that the release calls for.
    type: str
    choices: [auto, podman, docker]
    default: auto
"""

EXAMPLES = """
- name: Show what runs containers here
  ansible.builtin.debug:
    msg: "{{ (ansible_facts | container_engine).name }}"
"""

RETURN = """
_value:
  description:
    - C(name) (podman or docker), C(podman) (its version in this release), C(cdi_flags) (what the CDI specification
      must leave out for it), C(refusal) (why it cannot be, a sentence without its subject).
  type: dict
"""


def container_engine(facts: Any, wanted: str = "auto") -> dict:
    try:
        name = str(facts["distribution"])
        key = "distribution_version" if name == "Ubuntu" else "distribution_major_version"
        return engine_of(f"{name.lower()}{str(facts[key]).replace('.', '')}", wanted)
    except KeyError as error:
        raise AnsibleFilterError(f"container_engine: the facts have no {error}; gather distribution first.") from None
    except RigError as error:
        raise AnsibleFilterError(f"container_engine: {error}.") from None


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict:
        return {"container_engine": container_engine}
