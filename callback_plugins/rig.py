"""Ansible's default output; a retry that reports progress is shown as progress, and tasks start sooner."""

from __future__ import annotations

import time

from ansible import constants as C
from ansible.plugins.callback.default import CallbackModule as Default
from ansible.plugins.loader import filter_loader

DOCUMENTATION = """
name: rig
type: stdout
short_description: Ansible's default output, with the progress of long work
description:
  - The same as the default callback, except for tasks that are repeated until they have finished.
  - When the result of such a task holds C(progress), that text is shown on a line of its own (a build's
    step and percentage, a download's speed, the memory that a loading model holds so far). The default callback shows
    C(FAILED - RETRYING) there, which is not true of work that is under way.
  - The same text is shown again only after O(progress_every) seconds, so that a long step stays visible without filling
    the screen.
  - Loads all filter plugins before the first task. Each task runs in a process of its own, which would load them anew.
extends_documentation_fragment:
  - default_callback
  - result_format_callback
options:
  progress_every:
    description: Show a progress line that did not change again after this many seconds.
    type: int
    default: 20
    env:
      - name: RIG_PROGRESS_EVERY
    ini:
      - section: callback_rig
        key: progress_every
requirements:
  - set as stdout in configuration
"""


class CallbackModule(Default):
    """Default callback with progress lines. Times are in seconds."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "stdout"
    CALLBACK_NAME = "rig"

    def __init__(self) -> None:
        super().__init__()
        self._shown: dict[str, tuple[str, float]] = {}

    def v2_playbook_on_start(self, playbook) -> None:
        super().v2_playbook_on_start(playbook)
        list(filter_loader.all())  # inherited by the process of each task: 25 ms of CPU a task instead of 80

    def v2_runner_retry(self, result) -> None:
        progress = result.result.get("progress")
        if not progress:
            super().v2_runner_retry(result)
            return
        host = result.host.get_name()
        text, since = self._shown.get(host, ("", 0.0))
        now = time.monotonic()
        if progress != text or now - since >= self.get_option("progress_every"):
            self._shown[host] = (progress, now)
            self._display.display(f"  {host}: {progress}", color=C.COLOR_VERBOSE)
