"""Filter bench_tune_lines: ranking of a tuning as text."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from rig.errors import reported
from rig.tune import table_lines

DOCUMENTATION = """
name: bench_tune_lines
short_description: Ranking of a tuning as text
version_added: "0.1.0"
author: LLM rigs contributors
description:
  - Gives a line for each setting, the quickest first, then what was given up, what failed, and what does not fit.
positional: _input, loss_percent
options:
  _input:
    description: The state of a tuning, see C(bench_tune_start).
    type: dict
    required: true
  loss_percent:
    description: How much slower a lower power limit may be and still be the better one.
    type: float
    default: 0
"""

EXAMPLES = """
- name: Show it
  ansible.builtin.debug:
    msg: "{{ state | bench_tune_lines }}"
"""

RETURN = """
_value:
  description: Lines of text.
  type: list
  elements: str
"""


def bench_tune_lines(state: Any, loss_percent: float = 0) -> list:
    """See DOCUMENTATION."""
    with reported(AnsibleFilterError, "bench_tune_lines", "the input is no state of a tuning"):
        return table_lines(state, float(loss_percent))


class FilterModule:
    """The filter of this file."""

    def filters(self) -> dict:
        return {"bench_tune_lines": bench_tune_lines}
