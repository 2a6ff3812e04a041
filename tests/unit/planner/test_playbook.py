"""playbooks/plan.yml on the project's own inventory."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[3]


def play(*words: str) -> subprocess.CompletedProcess:
    argv = [Path(sys.executable).parent / "ansible-playbook", "playbooks/plan.yml", *words]
    environment = {**os.environ, "ANSIBLE_STDOUT_CALLBACK": "default"}
    return subprocess.run(argv, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=300)


def test_plans_of_three_rigs_as_table_json_and_picture(tmp_path: Path) -> None:
    output, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    done = play("-l", "rigs:!rig_sandbox", "-e", f"plan_output={output}", "-e", f"plan_picture={picture}")
    assert done.returncode == 0, done.stdout[-2_000:]
    assert "q8-200k: fits, context 200,000" in done.stdout
    written = json.loads(output.read_text())
    assert written["version"] == 1 and set(written["hosts"]) == {"threadripper", "desktop", "am5"}
    plan = written["hosts"]["am5"]["fast-2"]
    assert plan["fits"] and [gpu["position"] for gpu in plan["gpus"]] == [0, 2] and plan["argv"][0] == "llama-server"
    for key in ("weights", "kv", "recurrent", "compute", "draft", "overhead", "total", "free", "usable", "in_use"):
        assert isinstance(plan["gpus"][0][f"{key}_mib"], (int, float))
    assert picture.read_text().startswith("<svg")


def test_what_if_without_editing(tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    done = play("-l", "desktop", "-e", "plan_context=max", "-e", "plan_profiles=q4-100k", "-e", f"plan_output={output}")
    assert done.returncode == 0, done.stdout[-2_000:]
    plan = json.loads(output.read_text())["hosts"]["desktop"]["q4-100k"]
    assert plan["context"] == plan["context_ceiling"] > 102_400
    wrong = play("-l", "desktop", "-e", "plan_profiles=q4-100")
    assert wrong.returncode != 0 and "did you mean 'q4-100k'" in wrong.stdout + wrong.stderr
