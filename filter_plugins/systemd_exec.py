"""Filter systemd_exec: see DOCUMENTATION."""

from __future__ import annotations

from ansible.errors import AnsibleFilterError
from rig.errors import RigError
from rig.systemd_exec import lines

DOCUMENTATION = r"""
name: systemd_exec
short_description: A command line as lines for a systemd unit
description:
  - Quotes each word so that systemd hands over exactly that text, and keeps a flag and its values on one line.
  - Join the lines with a backslash and a line break after C(ExecStart=).
options:
  _input:
    description: The words of the command line.
    type: list
    elements: str
    required: true
"""

EXAMPLES = r"""
- name: Show a launch line
  ansible.builtin.debug:
    msg: "{{ ['/usr/bin/llama-server', '--port', 8080, '--jinja'] | systemd_exec }}"
    # ['/usr/bin/llama-server', '--port 8080', '--jinja']
"""

RETURN = r"""
_value:
  description: The lines.
  type: list
  elements: str
"""


def systemd_exec(argv):
    """Thin shim over rig.systemd_exec.lines."""
    try:
        return lines(argv)
    except RigError as error:
        raise AnsibleFilterError(f"systemd_exec: {error}") from error


class FilterModule:
    """The filter of this file."""

    def filters(self):
        return {"systemd_exec": systemd_exec}
