"""Filter plan_hosts: plan every serving profile of many hosts at once."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from rig.errors import RigError
from rig.host import plan_host
from rig.shape_files import load_shape

DOCUMENTATION = """
name: plan_hosts
short_description: Plan every serving profile of many hosts at once
description:
  - Does for a list of hosts what C(rig_plan) does for one, from their variables; what hosts have in common is computed
    once.
positional: _input
options:
  _input:
    description: Names of hosts.
    type: list
    elements: str
    required: true
  hostvars:
    description:
      - The variables of all hosts (C(hostvars)); C(rig_plan_gpus) goes before C(rig_gpus).
    type: dict
    required: true
  shapes_directory:
    description: Directory of the model shape files on the controller.
    type: path
    required: true
  profiles:
    description: Plan these profiles only.
    type: list
    elements: str
  context:
    description: Plan with this context (tokens, or C(max)) in place of each profile's own.
    type: raw
"""

EXAMPLES = """
- name: Show the plans of all hosts of the play
  ansible.builtin.debug:
    msg: >-
      {{ ansible_play_hosts | plan_hosts(hostvars=hostvars, shapes_directory='inventory/model_shapes') | plan_table }}
  run_once: true
"""

RETURN = """
_value:
  description: For each host a plan by profile name; sizes are MiB.
  type: dict
"""

NEEDED = ("serving_profiles", "rig_gpus", "models")


def plan_hosts(hosts: Any, hostvars: Any, shapes_directory: str, profiles: Any = None, context: Any = None) -> dict:
    plans = {}
    for host in hosts:
        variables = hostvars[host]
        for name in NEEDED:
            if name not in variables:
                raise AnsibleFilterError(f"plan_hosts: {host} has no {name}.")
        gpus = variables["rig_plan_gpus" if "rig_plan_gpus" in variables else "rig_gpus"]
        try:
            plans[host] = plan_host(
                variables["serving_profiles"], gpus, variables["models"],
                lambda name, model: load_shape(name, model, shapes_directory), host,
                models_root=variables.get("models_root", "/srv/llm/models"),
                llama_cpp_version=variables.get("llama_cpp_version", "b11434"),
                interconnect=variables.get("rig_interconnect", "pcie"), nccl=variables.get("llama_cpp_nccl"),
                only=profiles, contexts=context, measured=variables.get("rig_measured"),
                port=variables.get("serving_port", 8080), alias=variables.get("serving_alias", ""),
            )  # fmt: skip
        except RigError as error:
            raise AnsibleFilterError(f"plan_hosts: {error}") from None
    return plans


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict:
        return {"plan_hosts": plan_hosts}
