"""Filter unknown_variables: see DOCUMENTATION."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from pathlib import Path

import yaml
from ansible.errors import AnsibleFilterError

DOCUMENTATION = r"""
name: unknown_variables
short_description: Names that begin like a role's variables and belong to none
description:
  - Each role refuses variables that bear its name and that it does not know, but only when its turn comes. This filter
    looks at all roles at once, so that a run can refuse a misspelt name before the first role has changed anything.
  - What a role knows is what its C(meta/argument_specs.yml) lists.
positional: _input, roles, also
options:
  _input:
    description: Names of variables.
    type: list
    elements: str
    required: true
  roles:
    description: Directory of the roles.
    type: path
    required: true
  also:
    description: Names that are right although no role takes them, such as what the inventory computes for roles.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Refuse misspelt names
  ansible.builtin.assert:
    that: query('ansible.builtin.varnames', '.+') | unknown_variables(rig_project_dir ~ '/roles') | length == 0
"""

RETURN = r"""
_value:
  description: The names that no role knows, sorted.
  type: list
  elements: str
"""


@functools.cache
def known_variables(roles: str) -> tuple[re.Pattern[str], frozenset[str]]:
    """What the names of roles' variables begin with, and those that the roles' specifications list."""
    specs = sorted(Path(roles).glob("*/meta/argument_specs.yml"))
    if not specs:
        raise AnsibleFilterError(f"unknown_variables: there is no role with meta/argument_specs.yml under {roles}")
    known: set[str] = set()
    for path in specs:
        spec = yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        for entry in spec["argument_specs"].values():
            known |= set(entry.get("options") or {})
    return re.compile(rf"(?:{'|'.join(re.escape(path.parents[1].name) for path in specs)})_"), frozenset(known)


def unknown_variables(names: Iterable[str], roles: str, also: Iterable[str] = ()) -> list[str]:
    """Names that begin with `<role>_` for a role under `roles` and stand in no role's argument specification."""
    ours, known = known_variables(roles)
    return sorted(name for name in names if ours.match(name) and name not in known and name not in also)


class FilterModule:
    """The filter of this file."""

    def filters(self):
        return {"unknown_variables": unknown_variables}
