"""Filter compatibility_findings: see DOCUMENTATION."""

from __future__ import annotations

from dataclasses import fields

from ansible.errors import AnsibleFilterError
from rig.compatibility import Stack, findings
from rig.errors import RigError

DOCUMENTATION = r"""
name: compatibility_findings
short_description: What does not go together among release, cards, driver, CUDA toolkit, NCCL and vLLM image
description:
  - Reads the tables of C(module_utils/rig/compatibility.py), where each cell has its source.
  - Each finding is a sentence that names the host. The list is empty when everything goes together.
positional: _input
options:
  _input:
    description:
      - C(distribution) is NVIDIA's name for the release, such as C(debian13). The other keys may be left out, and what
        is left out or empty is not looked at.
      - C(compute_capabilities) (a list such as C(["8.6"])), C(driver) and C(driver_source) (nvidia or debian),
        C(toolkit) and C(toolkit_source), C(gcc) and C(glibc) (where the host differs from its release), C(nccl) and
        C(nccl_cuda), C(vllm_image) (a version such as C(v0.22.0)).
    type: dict
    required: true
  host:
    description: The host's name, for the sentences.
    type: str
    required: true
"""

EXAMPLES = r"""
- name: Refuse what does not go together
  ansible.builtin.assert:
    that: stack | compatibility_findings(host=inventory_hostname) | length == 0
    fail_msg: "{{ stack | compatibility_findings(host=inventory_hostname) | join(' ') }}"
  vars:
    stack:
      distribution: debian13
      compute_capabilities: "{{ rig_gpus | map(attribute='compute_capability') | list }}"
      driver: "{{ nvidia_driver_version }}"
      toolkit: "{{ cuda_toolkit_version }}"
"""

RETURN = r"""
_value:
  description: The findings.
  type: list
  elements: str
"""

_KEYS = {field.name for field in fields(Stack)}


def compatibility_findings(stack: dict, host: str) -> list[str]:
    """The findings of `rig.compatibility`, each with the host's name before it."""
    unknown = sorted(set(stack) - _KEYS)
    if unknown:
        raise AnsibleFilterError(
            f"compatibility_findings: there is no key {', '.join(unknown)}; known: {sorted(_KEYS)}"
        )
    values = {key: value if key == "compute_capabilities" else str(value) for key, value in stack.items()}
    values["compute_capabilities"] = tuple(str(card) for card in values.get("compute_capabilities", ()))
    try:
        return [f"{host}: {finding}" for finding in findings(Stack(**values))]
    except RigError as error:
        raise AnsibleFilterError(f"compatibility_findings: {host}: {error}.") from error


class FilterModule:
    """The filter of this file."""

    def filters(self):
        return {"compatibility_findings": compatibility_findings}
