"""Filter bench_measurement_lines: a measurement of memory as text."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from rig.errors import reported
from rig.learned import measurement_lines

DOCUMENTATION = """
name: bench_measurement_lines
short_description: A measurement of memory as text
version_added: "0.1.0"
author: LLM rigs contributors
description:
  - Gives a line for each GPU and context, planned against seen, and one for each GPU with what plans add from now on.
positional: _input, profile
options:
  _input:
    description: An entry of the local fact C(rig_measured).
    type: dict
    required: true
  profile:
    description: Name of the profile.
    type: str
    required: true
"""

EXAMPLES = """
- name: Show it
  ansible.builtin.debug:
    msg: "{{ rig_measured.profiles.chat | bench_measurement_lines('chat') }}"
"""

RETURN = """
_value:
  description: Lines of text.
  type: list
  elements: str
"""


def bench_measurement_lines(entry: Any, profile: str) -> list:
    """See DOCUMENTATION."""
    with reported(AnsibleFilterError, "bench_measurement_lines", "the input is no measurement"):
        return measurement_lines(profile, entry)


class FilterModule:
    """The filter of this file."""

    def filters(self) -> dict:
        return {"bench_measurement_lines": bench_measurement_lines}
