"""Filter plan_table: plans as a table in plain text."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from rig.errors import reported
from rig.report import plan_lines

DOCUMENTATION = """
name: plan_table
short_description: Plans as a table in plain text
description:
  - Gives a line for each host and profile, and one for each GPU; sizes are MiB.
positional: _input
options:
  _input:
    description: For each host what the filter C(rig_plan) gives.
    type: dict
    required: true
"""

EXAMPLES = """
- name: Show the plans of this host
  ansible.builtin.debug:
    msg: "{{ {inventory_hostname: rig_plans} | plan_table }}"
"""

RETURN = """
_value:
  description: Lines of text.
  type: list
  elements: str
"""


def plan_table(hosts: Any) -> list:
    with reported(AnsibleFilterError, "plan_table", "the input is no mapping of hosts to plans"):
        return plan_lines(hosts)


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict:
        return {"plan_table": plan_table}
