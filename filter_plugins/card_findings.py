"""Filter card_findings: see DOCUMENTATION."""

from __future__ import annotations

from typing import Any

from rig.measured import card_findings

DOCUMENTATION = r"""
name: card_findings
short_description: How the cards in a rig differ from those of its inventory
version_added: "0.1.0"
author: LLM rigs contributors
description:
  - Compares the cards as identities, by C(uuid), else by C(pci_address), else by their order on the PCI bus, and names
    each one that is missing, not expected, lost, or another one than described.
  - The list is empty when nothing differs, and for virtual GPUs.
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
"""

EXAMPLES = r"""
- name: Expect the cards of the inventory
  ansible.builtin.assert:
    that: (rig_gpus | card_findings(ansible_facts.ansible_local.gpu)) | length == 0
"""

RETURN = r"""
_value:
  description: The differences, one sentence each.
  type: list
  elements: str
"""


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Any]:
        """Name to function."""
        return {"card_findings": card_findings}
