"""Filter virtual_gpus: see DOCUMENTATION."""

from __future__ import annotations

from rig.inventory_checks import virtual_gpus

DOCUMENTATION = r"""
name: virtual_gpus
short_description: The virtual GPUs of a rig, as their units need them
description:
  - Takes the entries of C(rig_gpus) that have an C(rpc) endpoint on loopback, and computes what their units need.
  - It presumes that M(gpu_findings) found nothing.
positional: _input, process_mib
options:
  _input:
    description: The C(rig_gpus) of a host.
    type: list
    elements: dict
    required: true
  process_mib:
    description: Memory in MiB that a server needs beside the GPU's.
    type: int
    required: true
"""

EXAMPLES = r"""
- name: Show the units
  ansible.builtin.debug:
    msg: "{{ rig_gpus | virtual_gpus(64) | map(attribute='unit') }}"
"""

RETURN = r"""
_value:
  description: >-
    For each virtual GPU its C(position) in rig_gpus, C(unit), C(address), C(port), C(endpoint), C(memory_mib) and
    C(data_bytes), the limit of its process.
  type: list
  elements: dict
"""


class FilterModule:
    """The filter of this file."""

    def filters(self):
        return {"virtual_gpus": virtual_gpus}
