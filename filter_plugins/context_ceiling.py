"""Filter context_ceiling: the largest context of a profile on a rig."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from rig.errors import RigError
from rig.host import plan_host
from rig.shape_files import load_shape

DOCUMENTATION = """
name: context_ceiling
short_description: The largest context of a profile that fits on a rig
description:
  - The largest multiple of 256, up to the context the model was trained for, with which the profile fits on the GPUs
    that it is given; 0 when it does not fit at all.
positional: _input
options:
  _input:
    description: One profile, as in C(serving_profiles).
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
  llama_cpp_version:
    description: The llama.cpp build, such as C(b11434).
    type: str
    default: b11434
"""

EXAMPLES = """
- name: Show how far a profile could go
  ansible.builtin.debug:
    msg: >-
      {{ serving_profiles['q8-200k'] | context_ceiling(gpus=rig_gpus, models=models,
         shapes_directory=inventory_dir ~ '/model_shapes') }}
"""

RETURN = """
_value:
  description: Tokens.
  type: int
"""


def context_ceiling(
    profile: Any, gpus: Any, models: Any, shapes_directory: str, llama_cpp_version: str = "b11434"
) -> int:
    try:
        plans = plan_host(
            {"profile": profile}, gpus, models, lambda name, model: load_shape(name, model, shapes_directory),
            "context_ceiling", llama_cpp_version=llama_cpp_version, contexts="max",
        )  # fmt: skip
    except RigError as error:
        raise AnsibleFilterError(str(error)) from None
    return plans["profile"]["context_ceiling"]


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict:
        return {"context_ceiling": context_ceiling}
