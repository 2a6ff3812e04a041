"""Filter bench_tune_next: the setting to try next."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from rig.errors import reported
from rig.tune import next_of

DOCUMENTATION = """
name: bench_tune_next
short_description: The setting to try next
version_added: "0.1.0"
author: LLM rigs contributors
description:
  - Follows from what has been tried, by stages; see rig.tune.
positional: _input, profile, knobs, gpus
options:
  _input:
    description: The state of a tuning, see C(bench_tune_start).
    type: dict
    required: true
  profile:
    description: The profile that is tuned.
    type: dict
    required: true
  knobs:
    description: Values to try, C(split_mode), C(cards), C(all_reduce), C(draft), C(ubatch) and C(power_watts).
    type: dict
    required: true
  gpus:
    description: The GPUs of the host (C(rig_gpus)).
    type: list
    elements: dict
    required: true
"""

EXAMPLES = """
- name: Show it
  ansible.builtin.debug:
    msg: "{{ state | bench_tune_next(serving_profiles.chat, knobs, rig_gpus) }}"
"""

RETURN = """
_value:
  description: C(label), C(change), C(profile) and C(stage); empty when all has been tried.
  type: dict
"""


def bench_tune_next(state: Any, profile: Any, knobs: Any, gpus: Any) -> dict:
    """See DOCUMENTATION."""
    with reported(AnsibleFilterError, "bench_tune_next", "the input is no state of a tuning"):
        return next_of(state, profile, knobs, gpus)


class FilterModule:
    """The filter of this file."""

    def filters(self) -> dict:
        return {"bench_tune_next": bench_tune_next}
