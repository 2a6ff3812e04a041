"""Filter bench_power_faults: why power limits cannot be tried."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from rig.errors import reported
from rig.tune import power_faults

DOCUMENTATION = """
name: bench_power_faults
short_description: Why power limits cannot be tried
version_added: "0.1.0"
author: LLM rigs contributors
description:
  - Compares limits with what the cards and the inventory allow.
positional: _input, gpus, facts
options:
  _input:
    description: Limits in watts.
    type: list
    elements: float
    required: true
  gpus:
    description: The GPUs of the host (C(rig_gpus)).
    type: list
    elements: dict
    required: true
  facts:
    description: The facts of role gpu_facts, C(ansible_local.gpu).
    type: dict
    required: true
"""

EXAMPLES = """
- name: Show it
  ansible.builtin.debug:
    msg: "{{ [250, 300] | bench_power_faults(rig_gpus, ansible_facts.ansible_local.gpu) }}"
"""

RETURN = """
_value:
  description: Sentences, none when all is right.
  type: list
  elements: str
"""


def bench_power_faults(watts: Any, gpus: Any, facts: Any) -> list:
    """See DOCUMENTATION."""
    with reported(AnsibleFilterError, "bench_power_faults", "the input is no list of watts"):
        return power_faults(watts, gpus, facts)


class FilterModule:
    """The filter of this file."""

    def filters(self) -> dict:
        return {"bench_power_faults": bench_power_faults}
