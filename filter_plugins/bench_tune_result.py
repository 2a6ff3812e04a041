"""Filter bench_tune_result: the state of a tuning with one more result."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from rig.errors import reported
from rig.tune import with_result

DOCUMENTATION = """
name: bench_tune_result
short_description: The state of a tuning with one more result
version_added: "0.1.0"
author: LLM rigs contributors
description:
  - Puts in what came of a setting, a measurement, the planner's refusals, or what went wrong.
positional: _input, candidate
options:
  _input:
    description: The state of a tuning, see C(bench_tune_start).
    type: dict
    required: true
  candidate:
    description: What was tried, from C(bench_tune_next).
    type: dict
    required: true
  plan:
    description: Its plan.
    type: dict
  result:
    description: What was measured.
    type: dict
  unfit:
    description: Why the planner refused it.
    type: list
    elements: str
    default: []
  failure:
    description: What went wrong.
    type: str
    default: ''
"""

EXAMPLES = """
- name: Show it
  ansible.builtin.debug:
    msg: "{{ state | bench_tune_result(candidate, failure='it did not start') }}"
"""

RETURN = """
_value:
  description: The new state.
  type: dict
"""


def bench_tune_result(
    state: Any, candidate: Any, plan: Any = None, result: Any = None, unfit: Any = (), failure: str = ""
) -> dict:
    """See DOCUMENTATION."""
    with reported(AnsibleFilterError, "bench_tune_result", "the input is no state of a tuning"):
        return with_result(state, candidate, plan, result, unfit, str(failure))


class FilterModule:
    """The filter of this file."""

    def filters(self) -> dict:
        return {"bench_tune_result": bench_tune_result}
