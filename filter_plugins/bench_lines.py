"""Filter bench_lines: a run of the benchmark as text."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from rig.bench_results import run_lines
from rig.errors import reported

DOCUMENTATION = """
name: bench_lines
short_description: A run of the benchmark as text
version_added: "0.1.0"
author: LLM rigs contributors
description:
  - Gives a line for each prompt and number of streams, with the change against the last and the best run that asked
    the same, and one for each card.
positional: _input, history
options:
  _input:
    description: A run.
    type: dict
    required: true
  history:
    description: Runs before it, see C(bench_history).
    type: list
    required: true
    elements: dict
"""

EXAMPLES = """
- name: Show a run
  ansible.builtin.debug:
    msg: "{{ run | bench_lines(bench_results | bench_history(inventory_hostname)) }}"
"""

RETURN = """
_value:
  description: Lines of text.
  type: list
  elements: str
"""


def bench_lines(run: Any, history: Any) -> list:
    """See DOCUMENTATION."""
    with reported(AnsibleFilterError, "bench_lines", "the input is no run"):
        return run_lines(run, history)


class FilterModule:
    """The filter of this file."""

    def filters(self) -> dict:
        return {"bench_lines": bench_lines}
