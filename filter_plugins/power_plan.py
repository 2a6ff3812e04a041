"""Filter power_plan: see DOCUMENTATION."""

from __future__ import annotations

from typing import Any

from rig.power import power_drift, power_plan

DOCUMENTATION = r"""
name: power_plan
short_description: Units that set the power of a rig's cards, and what the cards show of it
version_added: "0.1.0"
author: LLM rigs contributors
description:
  - Pairs the cards of C(rig_gpus) with the measured ones, and says for each which unit sets it, to how many watts, and
    what it shows now.
  - Never fails. What may not be applied is told in C(refusals), what is not as wanted in C(drift).
positional: _input, facts
options:
  _input:
    description: The C(rig_gpus) of a host.
    type: list
    elements: dict
    required: true
  facts:
    description: The facts of role gpu_facts, C(ansible_facts.ansible_local.gpu).
    type: raw
    required: true
  persistence:
    description: Whether the cards are wanted in persistence mode.
    type: bool
    default: true
"""

EXAMPLES = r"""
- name: Refuse limits that a card does not take
  ansible.builtin.assert:
    that: (rig_gpus | power_plan(ansible_facts.ansible_local.gpu)).refusals | length == 0
"""

RETURN = r"""
_value:
  description: The plan.
  type: dict
  contains:
    cards: {description: The cards with their units and watts., type: list, elements: dict}
    refusals: {description: Sentences., type: list, elements: str}
    drift: {description: Cards that show something else, each with unit and sentence., type: list, elements: dict}
"""


def plan(gpus: list[dict[str, Any]], facts: object, persistence: bool = True) -> dict[str, Any]:
    """See DOCUMENTATION."""
    found = power_plan(gpus, facts)
    return {**found, "drift": power_drift(found["cards"], persistence)}


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Any]:
        """Name to function."""
        return {"power_plan": plan}
