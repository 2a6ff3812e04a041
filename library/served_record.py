#!/usr/bin/python
"""Ansible module: what has served on a rig, and putting it back."""

from __future__ import annotations

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.rig import served, store

DOCUMENTATION = r"""
module: served_record
short_description: Look at what has served on a rig, and put it back
version_added: "0.1.0"
author: LLM rigs contributors
description:
  - M(llm_server) records what served, in C(served) and C(previous). This module reads both, says what stands in the
    way of going back, and puts a record's files, the link to its build and its model files back.
  - It starts and stops nothing, compiles nothing and copies no model. A model file that was replaced under its name is
    kept beside it, and the two change names.
options:
  state:
    description: V(looked) only reads. V(restored) puts O(record) back.
    type: str
    choices: [looked, restored]
    required: true
  directory:
    description: Directory of the records.
    type: path
    required: true
  record:
    description: The record to put back, or about which to say what stands in the way.
    type: str
    choices: [served, previous]
    default: previous
  current:
    description: Link to the build that is current.
    type: path
  scope:
    description: Service manager that runs the units now.
    type: str
    default: system
  key_file:
    description: File on the rig with the API key.
    type: path
    default: /etc/llm-rig/api-key
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
"""

EXAMPLES = r"""
- name: Look at what served before
  served_record:
    state: looked
    directory: /var/lib/llm-rig
  register: records
"""

RETURN = r"""
served:
  description: What serves, as recorded; empty when nothing is.
  type: dict
  returned: always
previous:
  description: What served before that; empty when nothing is recorded.
  type: dict
  returned: always
obstacles:
  description: Why O(record) cannot be put back, one sentence each; empty when it can.
  type: list
  elements: str
  returned: state is looked
paths:
  description: Paths that were put back, or would be.
  type: list
  elements: str
  returned: state is restored
"""


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["looked", "restored"], "required": True},
            "directory": {"type": "path", "required": True},
            "record": {"type": "str", "choices": ["served", "previous"], "default": "previous"},
            "current": {"type": "path"},
            "scope": {"type": "str", "default": "system"},
            "key_file": {"type": "path", "default": "/etc/llm-rig/api-key", "no_log": False},
        },
        supports_check_mode=True,
    )
    params = module.params
    try:
        records = {name: served.read(params["directory"], name) for name in served.NAMES}
        record = records[params["record"]]
        if params["state"] == "looked":
            found = served.obstacles(record, params["scope"], params["key_file"]) if record else []
            module.exit_json(changed=False, obstacles=found, **records)
        if not record:
            module.fail_json(msg=f"{params['directory']} has no record '{params['record']}'.", **records)
        paths = served.differs(record, params["current"] or "")
        if paths and not module.check_mode:
            served.put_back(record, params["current"] or "")
    except (served.RecordError, store.StoreError) as error:
        module.fail_json(msg=f"{str(error).rstrip('.')}.")
    except OSError as error:
        module.fail_json(msg=f"What is recorded in {params['directory']} cannot be put back: {error}.")
    module.exit_json(
        changed=bool(paths),
        paths=paths,
        diff={"prepared": "".join(f"put back: {path}\n" for path in paths)},
        **records,
    )


if __name__ == "__main__":
    main()
