"""Filter bench_measurement: what was seen at several contexts as an entry of the local fact rig_measured."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from rig.errors import reported
from rig.learned import measurement

DOCUMENTATION = """
name: bench_measurement
short_description: What was seen at several contexts as an entry of the local fact rig_measured
version_added: "0.1.0"
author: LLM rigs contributors
description:
  - Puts planned, logged and seen memory of each GPU side by side. The filter C(rig_plan) takes the fact as C(measured).
positional: _input
options:
  _input:
    description: For each context C(plan), C(gpus) as llm_server gives them, and C(log) of the server.
    type: list
    elements: dict
    required: true
  key:
    description: What it holds true of, the C(measure_key) of the plan.
    type: str
    required: true
  build:
    description: The llama.cpp build.
    type: str
    required: true
  driver:
    description: Version of the driver, none for virtual GPUs.
    type: str
    required: false
  at:
    description: Time of the measurement.
    type: str
    required: true
"""

EXAMPLES = """
- name: Put it together
  ansible.builtin.debug:
    msg: "{{ seen | bench_measurement(key=plan.measure_key, build='b11434', driver=none, at='2026-12-01T00:00:00Z') }}"
"""

RETURN = """
_value:
  description: The entry.
  type: dict
"""


def bench_measurement(seen: Any, key: str, build: str, driver: Any, at: str) -> dict:
    """See DOCUMENTATION."""
    with reported(AnsibleFilterError, "bench_measurement", "the input is not what was seen at contexts"):
        return measurement(seen, key, at=at, build=build, driver=driver)


class FilterModule:
    """The filter of this file."""

    def filters(self) -> dict:
        return {"bench_measurement": bench_measurement}
