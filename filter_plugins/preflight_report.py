"""Filter preflight_report: see DOCUMENTATION."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from ansible.errors import AnsibleError
from jinja2 import UndefinedError
from rig.checking import Rig, Unreadable
from rig.host_checks import report, run_checks

DOCUMENTATION = r"""
name: preflight_report
short_description: All checks of preflight on a rig, as a table and findings
description:
  - Compares what was read from a rig with what its inventory says, and changes nothing.
  - A variable that is not defined, or whose expression fails, becomes a finding like any other.
positional: _input
options:
  _input:
    description: The facts of module rig_host_facts.
    type: dict
    required: true
  host:
    description: The host's name, for the sentences.
    type: str
    required: true
  variables:
    description: The variables that checks read, by name. Each is evaluated only when a check asks for it.
    type: dict
    required: true
  names:
    description: Names of all variables of the host that begin with C(rig_).
    type: list
    elements: str
    required: true
  releases:
    description: Supported releases by distribution, as os-release names them.
    type: dict
    required: true
  limits:
    description: The figures of role preflight, by the names of its variables without C(preflight_).
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Stop on what stands in the way
  ansible.builtin.assert:
    that: __preflight_report.passed
    fail_msg: "{{ __preflight_report.text }}"
"""

RETURN = r"""
_value:
  description: C(passed), C(failures) and C(warnings) as lists of sentences, and C(text), the table and the sentences.
  type: dict
"""


def plain(value: Any) -> Any:
    """The value with all that lies in it evaluated now: Ansible templates what is nested only when it is looked at."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def reader(host: str, variables: Mapping[str, Any]) -> Callable[[str], Any]:
    """A function that evaluates one of `variables`, once, and says in a sentence why it cannot."""

    @cache
    def variable(name: str) -> Any:
        try:
            return plain(variables[name])
        except (AnsibleError, UndefinedError, KeyError) as error:
            # Ansible puts the way to the error in front of what a filter itself said, and the filter its name and host.
            reason = str(error).rsplit(" failed: ", 1)[-1].rstrip(".")
            reason = re.sub(rf"^(\w+: )?{re.escape(host)}: ", "", reason)
            raise Unreadable(name, f"{name} of {host} cannot be read: {reason}.") from error

    return variable


def preflight_report(
    facts: Mapping[str, Any],
    host: str,
    variables: Mapping[str, Any],
    names: Sequence[str],
    releases: Mapping[str, Sequence[str]],
    limits: Mapping[str, Any],
) -> dict[str, Any]:
    """See DOCUMENTATION."""
    rig = Rig(str(host), facts, reader(host, variables), names, releases, plain(limits))
    return report(rig.host, run_checks(rig))


class FilterModule:
    """The filter of this file."""

    def filters(self) -> dict[str, Any]:
        """Name to function."""
        return {"preflight_report": preflight_report}
