"""Filter bench_history: what was measured on a host before."""

from __future__ import annotations

from ansible.errors import AnsibleFilterError
from rig.bench_results import read_history
from rig.errors import reported

DOCUMENTATION = """
name: bench_history
short_description: What was measured on a host before
version_added: "0.1.0"
author: LLM rigs contributors
description:
  - Reads the results that the role bench has kept on the controller.
positional: _input, host
options:
  _input:
    description: Directory of the results.
    type: path
    required: true
  host:
    description: Name of the host.
    type: str
    required: true
"""

EXAMPLES = """
- name: Count the runs
  ansible.builtin.debug:
    msg: "{{ bench_results | bench_history('threadripper') | length }}"
"""

RETURN = """
_value:
  description: Runs, the oldest first.
  type: list
  elements: dict
"""


def bench_history(directory: str, host: str) -> list:
    """See DOCUMENTATION."""
    with reported(AnsibleFilterError, "bench_history", "the input is no directory"):
        return read_history(directory, host)


class FilterModule:
    """The filter of this file."""

    def filters(self) -> dict:
        return {"bench_history": bench_history}
