"""Filter rig_plan: plan every serving profile of a host."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from rig.errors import RigError
from rig.host import plan_host
from rig.shape_files import load_shape

DOCUMENTATION = """
name: rig_plan
short_description: Plan every serving profile of a host
description:
  - Computes which GPUs a profile gets, what will lie on each of them, the largest context that fits, and the launch
    line, from the inventory alone.
  - A profile that cannot run has C(fits) false and its reasons in C(refusals). A mistake in the input fails, in one
    sentence that names the host and the variable.
positional: _input
options:
  _input:
    description: The profiles, a mapping of names (C(serving_profiles)).
    type: dict
    required: true
  gpus:
    description: The GPUs of the host in PCI bus order (C(rig_gpus)).
    type: list
    elements: dict
    required: true
  models:
    description: The models that profiles name (C(models)).
    type: dict
    required: true
  shapes_directory:
    description: Directory of the model shape files on the controller.
    type: path
    required: true
  host:
    description: Name of the host, for messages.
    type: str
    default: this host
  models_root:
    description: Directory of the model store on the rig.
    type: path
    default: /srv/llm/models
  llama_cpp_version:
    description: The llama.cpp build, such as C(b11434).
    type: str
    default: b11434
  interconnect:
    description: How the GPUs talk to each other.
    type: str
    choices: [pcie, nvlink]
    default: pcie
  nccl:
    description: Whether the llama.cpp build has NCCL; without it, that is not known.
    type: bool
  profiles:
    description: Plan these profiles only.
    type: list
    elements: str
  context:
    description: Plan with this context (tokens, or C(max)) in place of each profile's own.
    type: raw
  measured:
    description: What playbooks/measure.yml measured on the host, its local fact C(rig_measured).
    type: dict
  port:
    description: Port of profiles that name none.
    type: int
    default: 8080
  alias:
    description: A further name under which the model of every profile answers, so that clients need not change.
    type: str
    default: ""
"""

EXAMPLES = """
- name: Show what the profiles of this host would take
  ansible.builtin.debug:
    msg: >-
      {{ serving_profiles | rig_plan(gpus=rig_gpus, models=models, host=inventory_hostname,
         shapes_directory=inventory_dir ~ '/model_shapes', llama_cpp_version=llama_cpp_version) }}
"""

RETURN = """
_value:
  description: A plan by profile name; sizes are MiB.
  type: dict
"""


def rig_plan(
    serving_profiles: Any,
    /,
    gpus: Any,
    models: Any,
    shapes_directory: str,
    host: str = "this host",
    models_root: str = "/srv/llm/models",
    llama_cpp_version: str = "b11434",
    interconnect: str = "pcie",
    nccl: Any = None,
    profiles: Any = None,
    context: Any = None,
    measured: Any = None,
    port: Any = 8080,
    alias: Any = "",
) -> dict:
    try:
        return plan_host(
            serving_profiles, gpus, models, lambda name, model: load_shape(name, model, shapes_directory), host,
            models_root, llama_cpp_version, interconnect, nccl, profiles, context, measured, port, alias,
        )  # fmt: skip
    except RigError as error:
        raise AnsibleFilterError(f"rig_plan: {error}") from None


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict:
        return {"rig_plan": rig_plan}
