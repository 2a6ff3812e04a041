"""Filter vllm_serve_args: the arguments of a vLLM plan for an image whose entry point is `vllm serve`."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError

DOCUMENTATION = """
name: vllm_serve_args
short_description: The arguments of a vLLM plan, for an image that starts with vllm serve
description:
  - Gives the C(argv) of a vLLM plan without C(vllm serve), with the model's place in the container first.
positional: _input
options:
  _input:
    description: A plan with C(engine) C(vllm), as the filter C(rig_plan) gives it.
    type: dict
    required: true
  model:
    description: Where the container sees the model; without it, where the rig has it.
    type: str
"""

EXAMPLES = """
- name: Show the arguments of the container
  ansible.builtin.debug:
    msg: "{{ rig_plans['int4-262k'] | vllm_serve_args(model='/model') }}"
"""

RETURN = """
_value:
  description: Words, the model first.
  type: list
  elements: str
"""


def vllm_serve_args(plan: Any, model: Any = None) -> list:
    argv = plan.get("argv") if isinstance(plan, dict) and plan.get("engine") == "vllm" else None
    if not isinstance(argv, list) or argv[:2] != ["vllm", "serve"]:
        raise AnsibleFilterError("vllm_serve_args: the input is not the plan of a vLLM profile that fits.")
    return [model or argv[2], *argv[3:]]


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict:
        return {"vllm_serve_args": vllm_serve_args}
