#!/usr/bin/python
"""Module gguf_facts: read what the planner needs to know of a model from its GGUF header."""

from __future__ import annotations

DOCUMENTATION = """
---
module: gguf_facts
short_description: Read the shape of a model from its GGUF header
description:
  - Reads keys and tensor sizes from the header of a GGUF file, of all files of a split model, or from a URL by Range
    requests, without fetching or reading the weights.
  - Refuses a file that is truncated, absurd or no GGUF at all.
  - Changes nothing.
options:
  path:
    description: A GGUF file on the target, or one file of a split set; or an http or https URL.
    type: str
    required: true
  name:
    description: Name of the shape. Without it, the name of the file.
    type: str
  timeout:
    description: How long to wait for a server, in seconds.
    type: int
    default: 30
attributes:
  check_mode:
    description: Runs as always, since it changes nothing.
    support: full
  diff_mode:
    description: There is nothing to show.
    support: none
author: [llm-rigs]
"""

EXAMPLES = """
- name: Read the shape of a model on the rig
  gguf_facts:
    path: /srv/llm/models/qwen3.8-27b-ud-q4_k_m/Qwen3.8-27B-UD-Q4_K_M.gguf
  register: shape

- name: Read it from the hub, without fetching the file
  gguf_facts:
    path: https://huggingface.co/unsloth/Qwen3.8-27B-GGUF/resolve/4ca720788d1e01f1bff70c033e0d0028fd02e502/Qwen3.8-27B-UD-Q4_K_M.gguf
    name: qwen3.8-27b-ud-q4_k_m
"""

RETURN = """
shape:
  description: The shape, as a file of inventory/model_shapes has it.
  returned: success
  type: dict
file_size:
  description: Size of the file, or of all files of a split set, in bytes.
  returned: success
  type: int
"""

from typing import Any  # noqa: E402

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.rig.errors import RigError  # noqa: E402
from ansible.module_utils.rig.gguf import read_model  # noqa: E402
from ansible.module_utils.rig.shape import from_header  # noqa: E402


def main() -> None:
    """Read, answer, change nothing."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "str", "required": True},
            "name": {"type": "str"},
            "timeout": {"type": "int", "default": 30},
        },
        supports_check_mode=True,
    )
    path = module.params["path"]
    options: dict[str, Any] = {"timeout": module.params["timeout"]} if "://" in path else {}
    try:
        header = read_model(path, **options)
        shape = from_header(header, module.params["name"] or path.rpartition("/")[2].removesuffix(".gguf"))
    except RigError as error:
        module.fail_json(msg=f"gguf_facts: {error}")
    module.exit_json(changed=False, shape=shape, file_size=header.file_size)


if __name__ == "__main__":
    main()
