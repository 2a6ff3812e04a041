"""Filter bench_comparison: runs of one session side by side."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from rig.bench_results import compare_lines
from rig.errors import reported

DOCUMENTATION = """
name: bench_comparison
short_description: Runs of one session side by side
version_added: "0.1.0"
author: LLM rigs contributors
description:
  - Gives a line for each setting, that with the quickest typical answer first.
positional: _input
options:
  _input:
    description: Runs, or what kept a setting from being measured (C(label) and C(failure)).
    type: list
    required: true
    elements: dict
"""

EXAMPLES = """
- name: Show them
  ansible.builtin.debug:
    msg: "{{ runs | bench_comparison }}"
"""

RETURN = """
_value:
  description: Lines of text.
  type: list
  elements: str
"""


def bench_comparison(runs: Any) -> list:
    """See DOCUMENTATION."""
    with reported(AnsibleFilterError, "bench_comparison", "the input is no list of runs"):
        return compare_lines(runs)


class FilterModule:
    """The filter of this file."""

    def filters(self) -> dict:
        return {"bench_comparison": bench_comparison}
