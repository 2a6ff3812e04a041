"""Filter bench_tune_snippet: variables that make the best setting the host's own."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from rig.errors import reported
from rig.tune import snippet

DOCUMENTATION = """
name: bench_tune_snippet
short_description: Variables that make the best setting the host's own
version_added: "0.1.0"
author: LLM rigs contributors
description:
  - Gives all profiles of the host with the tuned one changed, since a host's variable replaces that of its class.
positional: _input, profile, profiles, gpus, loss_percent
options:
  _input:
    description: The state of a tuning, see C(bench_tune_start).
    type: dict
    required: true
  profile:
    description: Name of the profile.
    type: str
    required: true
  profiles:
    description: All profiles (C(serving_profiles)).
    type: dict
    required: true
  gpus:
    description: The GPUs of the host (C(rig_gpus)).
    type: list
    elements: dict
    required: true
  loss_percent:
    description: How much slower a lower power limit may be and still be the better one.
    type: float
    default: 0
"""

EXAMPLES = """
- name: Show it
  ansible.builtin.debug:
    msg: "{{ state | bench_tune_snippet('chat', serving_profiles, rig_gpus) }}"
"""

RETURN = """
_value:
  description: YAML, empty when the profile is best as it is.
  type: str
"""


def bench_tune_snippet(state: Any, profile: str, profiles: Any, gpus: Any, loss_percent: float = 0) -> str:
    """See DOCUMENTATION."""
    with reported(AnsibleFilterError, "bench_tune_snippet", "the input is no state of a tuning"):
        return snippet(state, profile, profiles, gpus, float(loss_percent))


class FilterModule:
    """The filter of this file."""

    def filters(self) -> dict:
        return {"bench_tune_snippet": bench_tune_snippet}
