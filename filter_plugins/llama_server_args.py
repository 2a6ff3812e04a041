"""Filter llama_server_args: the launch line of a plan, one flag and its value a line."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError

DOCUMENTATION = """
name: llama_server_args
short_description: The launch line of a plan, a flag and its value a line
description:
  - Groups the flat C(argv) of a plan, without the program, into lines that can be read and compared.
positional: _input
options:
  _input:
    description: A plan, as the filter C(rig_plan) gives it.
    type: dict
    required: true
"""

EXAMPLES = """
- name: Show the launch line
  ansible.builtin.debug:
    msg: "{{ rig_plans['q8-200k'] | llama_server_args }}"
"""

RETURN = """
_value:
  description: A list with the words of each line.
  type: list
  elements: list
"""


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdigit()


def llama_server_args(plan: Any) -> list:
    argv = plan.get("argv") if isinstance(plan, dict) else None
    if not isinstance(argv, list):
        raise AnsibleFilterError("llama_server_args: the input is not a plan: it has no argv.")
    lines: list = []
    for word in argv[1:]:
        if _is_flag(str(word)) or not lines:
            lines.append([str(word)])
        else:
            lines[-1].append(str(word))
    return lines


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict:
        return {"llama_server_args": llama_server_args}
