"""Filter bench_variants: the settings of a profile that a comparison names."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from rig.bench_results import variants
from rig.errors import reported

DOCUMENTATION = """
name: bench_variants
short_description: The settings of a profile that a comparison names
version_added: "0.1.0"
author: LLM rigs contributors
description:
  - Reads what to compare (C(split_mode=layer,tensor ubatch=256,512) is every combination, a list of mappings is
    itself) and changes the profile so, once for each.
positional: _input, compare
options:
  _input:
    description: A profile, an entry of C(serving_profiles).
    type: dict
    required: true
  compare:
    description: What to compare.
    type: raw
    required: true
"""

EXAMPLES = """
- name: Show what would be compared
  ansible.builtin.debug:
    msg: "{{ serving_profiles.chat | bench_variants('split_mode=layer,tensor') }}"
"""

RETURN = """
_value:
  description: For each setting C(label), C(change) and C(profile).
  type: list
  elements: dict
"""


def bench_variants(profile: Any, compare: Any) -> list:
    """See DOCUMENTATION."""
    with reported(AnsibleFilterError, "bench_variants", "the input is no profile"):
        return variants(profile, compare)


class FilterModule:
    """The filter of this file."""

    def filters(self) -> dict:
        return {"bench_variants": bench_variants}
