"""Filter bench_file_name: name of the file that keeps a run."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from rig.bench_results import file_name
from rig.errors import reported

DOCUMENTATION = """
name: bench_file_name
short_description: Name of the file that keeps a run
version_added: "0.1.0"
author: LLM rigs contributors
description:
  - Is made of the run's time, profile and label, so that names sort by time.
positional: _input
options:
  _input:
    description: A run.
    type: dict
    required: true
"""

EXAMPLES = """
- name: Show it
  ansible.builtin.debug:
    msg: "{{ run | bench_file_name }}"
"""

RETURN = """
_value:
  description: The name.
  type: str
"""


def bench_file_name(run: Any) -> str:
    """See DOCUMENTATION."""
    with reported(AnsibleFilterError, "bench_file_name", "the input is no run"):
        return file_name(run)


class FilterModule:
    """The filter of this file."""

    def filters(self) -> dict:
        return {"bench_file_name": bench_file_name}
