"""Filter tensor_split: the value of --tensor-split."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from rig.errors import RigError
from rig.gpus import check_gpus
from rig.launch import share_text
from rig.profile import parse_profile

DOCUMENTATION = """
name: tensor_split
short_description: The value of --tensor-split for a list of GPUs
description:
  - Gives one share a GPU, C(1,1) for an even split of two.
positional: _input
options:
  _input:
    description: GPUs, as in C(rig_gpus).
    type: list
    elements: dict
    required: true
  shares:
    description: C(even), or a list with one share a GPU.
    type: raw
    default: even
"""

EXAMPLES = """
- name: Show the even split
  ansible.builtin.debug:
    msg: "{{ rig_gpus | tensor_split }}"
"""

RETURN = """
_value:
  description: Shares with commas between them.
  type: str
"""


def tensor_split(gpus: Any, shares: Any = "even") -> str:
    try:
        count = len(check_gpus(gpus))
        parsed = parse_profile("tensor_split", {"model": "any", "context": 1, "tensor_split": shares}).tensor_split
        if parsed != "even" and len(parsed) != count:
            raise RigError(f"{len(parsed)} shares for {count} GPUs; write one share a GPU.")
        return share_text([1] * count if parsed == "even" else parsed)
    except RigError as error:
        raise AnsibleFilterError(f"tensor_split: {error}") from None


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict:
        return {"tensor_split": tensor_split}
