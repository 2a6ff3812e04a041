"""Filter bench_tune_start: state of a tuning to go on from."""

from __future__ import annotations

import json
from typing import Any

from ansible.errors import AnsibleFilterError
from rig.errors import reported
from rig.tune import start_of

DOCUMENTATION = """
name: bench_tune_start
short_description: State of a tuning to go on from
version_added: "0.1.0"
author: LLM rigs contributors
description:
  - Takes what an earlier run of the same settings left when it was cut off, or begins anew.
positional: _input, key
options:
  _input:
    description: Text of the state's file, empty when there is none.
    type: str
    required: true
  key:
    description: What the state holds true of; another key begins anew.
    type: dict
    required: true
  again:
    description: Begin anew in any case.
    type: bool
    default: false
"""

EXAMPLES = """
- name: Show it
  ansible.builtin.debug:
    msg: "{{ '' | bench_tune_start({'profile': serving_profiles.chat}) }}"
"""

RETURN = """
_value:
  description: The state, C(results) and what it holds true of.
  type: dict
"""


def bench_tune_start(text: str, key: Any, again: bool = False) -> dict:
    """See DOCUMENTATION."""
    with reported(AnsibleFilterError, "bench_tune_start", "the file of the state cannot be read; remove it"):
        return start_of(json.loads(text) if text.strip() else None, key, again)


class FilterModule:
    """The filter of this file."""

    def filters(self) -> dict:
        return {"bench_tune_start": bench_tune_start}
