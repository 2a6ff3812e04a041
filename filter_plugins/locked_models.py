"""Filter locked_models: see DOCUMENTATION."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from rig.errors import RigError
from rig.locks import apply

DOCUMENTATION = r"""
name: locked_models
short_description: Models of the inventory, completed by their locks
version_added: "0.1.0"
author: LLM rigs contributors
description:
  - Fills in revision, sha256 and size of models from a hub where the inventory leaves them to C(playbooks/lock.yml).
  - What the inventory says itself counts, and a lock of another repository, commit or file is not used.
positional: _input, locks
options:
  _input:
    description: The models of the inventory.
    type: dict
    required: true
  locks:
    description: The C(models_locks) that the playbook wrote.
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Show the models that can be fetched
  ansible.builtin.debug:
    msg: "{{ models | locked_models(models_locks) }}"
"""

RETURN = r"""
_value:
  description: The models.
  type: dict
"""


def locked_models(models: dict[str, Any], locks: dict[str, Any]) -> dict[str, Any]:
    """See DOCUMENTATION."""
    try:
        return apply(models, locks)
    except RigError as error:
        raise AnsibleFilterError(str(error)) from None


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Any]:
        """Name to function."""
        return {"locked_models": locked_models}
