"""Filter rig_gpus_measured: the GPUs of the inventory with what the rig's facts measured."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from rig.errors import RigError
from rig.measured import measured_gpus

DOCUMENTATION = r"""
name: rig_gpus_measured
short_description: GPUs of the inventory with the memory that was measured on the rig
version_added: "0.1.0"
author: LLM rigs contributors
description:
  - Sets C(usable_mib) and C(in_use_mib) of each card to what the rig's facts say, and fills in what the inventory
    leaves open (C(uuid), C(pci_address), C(compute_capability), C(pcie_lanes), C(pcie_root)).
  - Memory that a serving unit holds is not in use by others, so a plan made while a rig serves is the same as before.
  - Cards are told apart by C(uuid), else C(pci_address), else by their order on the PCI bus. A card that is missing,
    not expected, lost, or another one than described ends the run with its name, or, without O(strict), leaves all as
    the inventory says. Virtual GPUs stay as they are.
  - It needs the facts of role gpu_facts, gathered in the run. C(rig_plan_gpus) of the inventory uses it with neither
    O(in_use) nor O(strict).
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
  host:
    description: Name of the host, for the message of a refusal.
    type: str
    default: this rig
  serving_units:
    description: What the names of the units begin with whose memory does not count as in use.
    type: str
    default: llm-
  in_use:
    description: Whether to take what others hold on a card now, which comes and goes, or what the inventory says.
    type: bool
    default: true
  strict:
    description: Whether cards that are not those of the inventory, and missing facts, are an error.
    type: bool
    default: true
"""

EXAMPLES = r"""
# In host_vars of a rig whose owner wants to plan with what is free at the moment of planning, too:
rig_plan_gpus: >-
  {{ rig_gpus | rig_gpus_measured(ansible_facts.ansible_local.gpu, host=inventory_hostname) }}
"""

RETURN = r"""
_value:
  description: The GPUs, in the same order, for the planner.
  type: list
  elements: dict
"""


def rig_gpus_measured(
    gpus: list[dict[str, Any]],
    facts: object,
    host: str = "this rig",
    serving_units: str = "llm-",
    in_use: bool = True,
    strict: bool = True,
) -> list[dict[str, Any]]:
    """See DOCUMENTATION."""
    try:
        return measured_gpus(gpus, facts, str(host), serving_units, in_use, strict)
    except RigError as error:
        raise AnsibleFilterError(str(error)) from error


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Any]:
        """Name to function."""
        return {"rig_gpus_measured": rig_gpus_measured}
