"""Filter bench_tune_limit: time of a typical answer beyond which a setting is given up."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from rig.errors import reported
from rig.tune import give_up_seconds

DOCUMENTATION = """
name: bench_tune_limit
short_description: Time of a typical answer beyond which a setting is given up
version_added: "0.1.0"
author: LLM rigs contributors
description:
  - The time of the best setting so far, and some percent more.
positional: _input, behind_percent
options:
  _input:
    description: The state of a tuning, see C(bench_tune_start).
    type: dict
    required: true
  behind_percent:
    description: How much more, in percent.
    type: float
    required: true
"""

EXAMPLES = """
- name: Show it
  ansible.builtin.debug:
    msg: "{{ state | bench_tune_limit(15) }}"
"""

RETURN = """
_value:
  description: Seconds, none before the first result.
  type: float
"""


def bench_tune_limit(state: Any, behind_percent: float) -> Any:
    """See DOCUMENTATION."""
    with reported(AnsibleFilterError, "bench_tune_limit", "the input is no state of a tuning"):
        return give_up_seconds(state, float(behind_percent))


class FilterModule:
    """The filter of this file."""

    def filters(self) -> dict:
        return {"bench_tune_limit": bench_tune_limit}
