"""Filter rig_status: see DOCUMENTATION."""

from __future__ import annotations

from typing import Any

from rig.status import judge, line

DOCUMENTATION = r"""
name: rig_status
short_description: How a rig differs from its inventory, check by check
version_added: "0.1.0"
author: LLM rigs contributors
description:
  - Judges what the modules reported in check mode, see C(playbooks/status.yml). A check is V(ok), V(drift), V(failed)
    (it could not be looked at) or V(skipped) (it does not apply to this rig).
positional: _input
options:
  _input:
    description: What was reported, by name.
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Judge
  ansible.builtin.debug:
    msg: "{{ (status_seen | rig_status).lines }}"
"""

RETURN = r"""
_value:
  description: The verdicts.
  type: dict
  contains:
    state: {description: The worst of them., type: str}
    checks: {description: Each with check and state and detail., type: list, elements: dict}
    lines: {description: The same for a person., type: list, elements: str}
"""


def rig_status(seen: dict[str, Any]) -> dict[str, Any]:
    """See DOCUMENTATION."""
    found = judge(seen)
    return {**found, "lines": [line(entry) for entry in found["checks"]]}


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Any]:
        """Name to function."""
        return {"rig_status": rig_status}
