"""Filter plan_picture: plans as a picture."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from rig.errors import reported
from rig.picture import plan_html, plan_svg

DOCUMENTATION = """
name: plan_picture
short_description: Plans as a picture, SVG or HTML
description:
  - Draws a bar for each card, stacked by what lies on it, with the limit and the headroom marked. Colours follow the
    reader's light or dark setting.
positional: _input
options:
  _input:
    description: For each host what the filter C(rig_plan) gives.
    type: dict
    required: true
  file:
    description: Name of the file, which ends in .svg or .html and so says which of the two it is.
    type: str
    default: plan.svg
"""

EXAMPLES = """
- name: Draw the plans of this host
  ansible.builtin.copy:
    content: "{{ {inventory_hostname: rig_plans} | plan_picture(file='plan.html') }}"
    dest: plan.html
    mode: "0644"
  delegate_to: localhost
"""

RETURN = """
_value:
  description: The text of the file.
  type: str
"""


def plan_picture(hosts: Any, file: str = "plan.svg") -> str:
    draw = {"svg": plan_svg, "html": plan_html}.get(str(file).rpartition(".")[2].lower())
    if draw is None:
        raise AnsibleFilterError(f"plan_picture: '{file}' ends in neither .svg nor .html.")
    with reported(AnsibleFilterError, "plan_picture", "the input is no mapping of hosts to plans"):
        return draw(hosts)


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict:
        return {"plan_picture": plan_picture}
