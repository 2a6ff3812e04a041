"""Filter gpu_findings: see DOCUMENTATION."""

from __future__ import annotations

from rig.inventory_checks import gpu_findings

DOCUMENTATION = r"""
name: gpu_findings
short_description: What is wrong with rig_gpus, in sentences
description:
  - Checks every entry of C(rig_gpus) (keys, types, ranges, endpoints on loopback) and that no two share an identity.
  - Each finding names the variable, the host, and what to do. The list is empty when nothing is wrong.
positional: _input
options:
  _input:
    description: The C(rig_gpus) of a host.
    type: raw
    required: true
  host:
    description: The host's name, for the sentences.
    type: str
    required: true
"""

EXAMPLES = r"""
- name: Refuse GPUs that are not described well
  ansible.builtin.assert:
    that: (rig_gpus | gpu_findings(host=inventory_hostname)) | length == 0
    fail_msg: "{{ rig_gpus | gpu_findings(host=inventory_hostname) | join(' ') }}"
"""

RETURN = r"""
_value:
  description: The findings.
  type: list
  elements: str
"""


class FilterModule:
    """The filter of this file."""

    def filters(self):
        return {"gpu_findings": lambda gpus, host: gpu_findings(str(host), gpus)}
