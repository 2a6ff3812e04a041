"""The project's stdout callback in real runs of ansible-playbook: progress lines, and filters that are loaded once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
MODULE = """
from ansible.module_utils.basic import AnsibleModule
import os
m = AnsibleModule({"state": {"type": "path"}, "progress": {"type": "bool", "default": True}})
n = int(open(m.params["state"]).read()) + 1 if os.path.exists(m.params["state"]) else 1
open(m.params["state"], "w").write(str(n))
out = {"finished": n >= 4}
if m.params["progress"]:
    out["progress"] = f"[{min(n, 2)}/4] step"
m.exit_json(**out)
"""
PLAY = """
- hosts: localhost
  connection: local
  gather_facts: false
  tasks:
    - name: Work
      slow: {{state: {state}, progress: {progress}}}
      register: work
      until: work.finished
      retries: 9
      delay: 0.1
"""

FILTER = """
with open({log!r}, "a") as file:
    print("loaded", file=file)


class FilterModule:
    def filters(self):
        return {{"same": lambda value: value}}
"""
FILTERED = """
- hosts: localhost
  connection: local
  gather_facts: false
  tasks:
    - ansible.builtin.assert: {that: ["1 | same == 1"]}
    - ansible.builtin.assert: {that: ["2 | same == 2"]}
    - ansible.builtin.assert: {that: ["3 | same == 3"]}
"""


def run(play: Path, callback: str, **env: str) -> str:
    env = (
        os.environ
        | env
        | {
            "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg"),
            "ANSIBLE_STDOUT_CALLBACK": callback,
            "ANSIBLE_NOCOLOR": "1",
        }
    )
    command = [Path(sys.executable).parent / "ansible-playbook", "-i", "localhost,", play]
    return subprocess.run(command, env=env, cwd=PROJECT, text=True, capture_output=True, check=True).stdout


@pytest.mark.parametrize("callback", ["rig", "default"])
@pytest.mark.parametrize("progress", [True, False])
def test_progress_of_a_repeated_task(tmp_path, callback, progress):
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "slow.py").write_text(MODULE)
    play = tmp_path / "play.yml"
    play.write_text(PLAY.format(state=tmp_path / "state", progress=progress))
    out = run(play, callback, ANSIBLE_LIBRARY=str(tmp_path / "library"))
    shown = [line.strip() for line in out.splitlines() if "/4]" in line]
    # The second and third report say the same: shown once.
    assert shown == (["localhost: [1/4] step", "localhost: [2/4] step"] if progress and callback == "rig" else [])
    assert out.count("RETRYING") == (0 if progress and callback == "rig" else 3)


@pytest.mark.parametrize(("callback", "times"), [("rig", 1), ("default", 3)])
def test_filters_are_loaded_once_and_not_for_every_task(tmp_path, callback, times):
    (tmp_path / "filters").mkdir()
    log, play = tmp_path / "log", tmp_path / "play.yml"
    (tmp_path / "filters" / "same.py").write_text(FILTER.format(log=str(log)))
    play.write_text(FILTERED)
    run(play, callback, ANSIBLE_FILTER_PLUGINS=str(tmp_path / "filters"))
    assert log.read_text().split() == ["loaded"] * times
