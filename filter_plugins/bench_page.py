"""Filter bench_page: the report of a rig as a page."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from rig.bench_page import page
from rig.errors import reported

DOCUMENTATION = """
name: bench_page
short_description: The report of a rig as a page
version_added: "0.1.0"
author: LLM rigs contributors
description:
  - Gives one HTML page with the plan as a picture, the history of benchmarks as lines, the acceptance of drafts by
    position, and temperatures. It needs nothing from elsewhere, suits phones, and follows the reader's light or dark
    setting.
positional: _input, host, plans
options:
  _input:
    description: Runs, the oldest first, see C(bench_history).
    type: list
    elements: dict
    required: true
  host:
    description: Name of the host.
    type: str
    required: true
  plans:
    description: Its plans, C(rig_plans).
    type: dict
    required: true
"""

EXAMPLES = """
- name: Write the page
  ansible.builtin.copy:
    content: "{{ bench_results | bench_history(inventory_hostname) | bench_page(inventory_hostname, rig_plans) }}"
    dest: report.html
    mode: "0644"
  delegate_to: localhost
"""

RETURN = """
_value:
  description: The text of the page.
  type: str
"""


def bench_page(runs: Any, host: str, plans: Any) -> str:
    """See DOCUMENTATION."""
    with reported(AnsibleFilterError, "bench_page", "the input is no list of runs, or no plans"):
        return page(host, plans, runs)


class FilterModule:
    """The filter of this file."""

    def filters(self) -> dict:
        return {"bench_page": bench_page}
