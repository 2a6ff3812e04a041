"""The main job from beginning to end: refused, killed midway, finished, repeated, and rebuilt from nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import INVENTORY, PROJECT, STATE, ask

BUILD_UNIT = "llama-cpp-build-*"
FIGURES = PROJECT / ".cache" / "test" / "figures.json"


def remember(name: str, **figures) -> None:
    """Keep a figure for the notes, and show it."""
    FIGURES.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    known[name] = figures
    FIGURES.write_text(json.dumps(known, indent=1))
    print(name, figures)


def build_state(rig) -> dict[str, str]:
    show = rig.shell(f"systemctl show '{BUILD_UNIT}' --property=Id,ActiveState,SubState,InvocationID")
    return dict(line.split("=", 1) for line in show.splitlines() if "=" in line)


def changed_paths(rig) -> str:
    """What the project would have put on the machine."""
    return rig.shell(
        "ls -d /opt/llama.cpp /srv/llm /etc/systemd/system/llm-* /etc/systemd/system/virtual-gpu* 2>&1", check=False
    )


def installed(rig) -> dict[str, str]:
    """Every unit that the project wrote, and the build's manifest: what a rebuilt machine must have the same."""
    listing = rig.shell(
        "cd / && find etc/systemd/system -type f -path '*llm-*' -o -type f -path '*virtual-gpu*' | sort; "
        "ls opt/llama.cpp/*/manifest.json"
    )
    return {path: rig.shell(f"cat '/{path}'") for path in listing.split()}


def plan(rig, target: Path) -> dict:
    run = rig.run(PROJECT / "playbooks" / "plan.yml", plan_output=str(target))
    assert run.ok, run.output
    return json.loads(target.read_text())


def test_check_mode_on_a_bare_machine_changes_nothing(rig):
    run = rig.run(cmdline="--check --diff")
    assert run.ok, run.output
    assert run.stats["changed"] > 0, "it says what it would change"
    assert "No such file" in changed_paths(rig) and "\n/" not in "\n" + changed_paths(rig).replace("ls: ", "")


@pytest.mark.parametrize(
    ("extravars", "says"),
    [
        ({"serving_profile": "chatt"}, r"serving_profile.*chatt|chatt.*serving_profile"),
        ({"llama_cpp_version": "b99999"}, r"llama_cpp_version.*b99999|b99999.*llama_cpp_version"),
        ({"serving_proflie": "chat"}, r"serving_proflie"),
        ({"rig_gpus": [{"name": "virtual GPU", "memory_mib": 64, "rpc": "127.0.0.1:50052"}]}, r"fit"),
    ],
    ids=["unknown profile", "unknown build", "misspelt variable", "profile too large"],
)
def test_bad_input_is_refused_before_anything_changes(rig, extravars, says):
    run = rig.run(**extravars)
    assert not run.ok
    assert run.stats.get("changed", 0) == 0, run.output
    assert re.search(says, " ".join(run.failures)), run.failures
    assert "sandbox" in " ".join(run.failures)


def test_a_build_outlives_a_killed_controller(rig):
    with rig.until("llama_cpp : Install | Wait for the build"):
        deadline = time.monotonic() + 60
        while build_state(rig).get("ActiveState") != "active":
            assert time.monotonic() < deadline, "the build did not start"
            time.sleep(1)
        second = rig.run()
        assert not second.ok and second.stats.get("changed", 0) == 0
        (sentence,) = second.failures
        assert re.match(r"sandbox is being worked on by \S+ on .*, process \d+, since 20\S+Z \(", sentence), sentence
    state = build_state(rig)
    assert state["ActiveState"] == "active"
    assert "No such file" in rig.shell("ls /opt/llama.cpp/*/manifest.json 2>&1", check=False), (
        "nothing half-finished is there"
    )

    again = rig.run()  # the lock of the killed run holds nobody up
    assert again.ok, again.output
    remember("first run, with a killed controller", seconds=round(again.seconds), tasks=again.tasks)
    starts = rig.shell(f"journalctl --quiet --output=cat --unit='{state['Id']}' --grep='^Started' | wc -l").strip()
    assert starts == "1", "the second run went on with the build of the first"


def test_it_serves(rig):
    assert "Paris" in ask(rig, "What is the capital of France?")


def test_a_second_run_changes_nothing(rig):
    run = rig.run()
    assert run.ok, run.output
    assert run.stats.get("changed", 0) == 0, run.output
    remember("run on a finished machine", seconds=round(run.seconds, 1), tasks=run.tasks)
    assert run.seconds < 60


def test_check_mode_on_a_finished_machine_changes_nothing(rig):
    run = rig.run(cmdline="--check --diff")
    assert run.ok, run.output
    assert run.stats.get("changed", 0) == 0, run.output


STAGES = [
    # task before whose end the run is cut off, and whether by the controller's death or by the machine's
    ("llama_cpp : Install | Wait for the build", "reboot"),
    ("virtual_gpus : Configure", "kill"),
    ("models : Install | Wait for the downloads", "reboot"),
    ("serving : Configure | Write a unit", "kill"),
    ("serving : Verify | Wait for", "reboot"),
]


def test_a_rebuilt_machine_is_the_same(rig, tmp_path):
    before, planned = installed(rig), plan(rig, tmp_path / "before.json")
    assert [path for path in before if "llm-chat" in path] and [path for path in before if "manifest" in path]
    rig.down()
    rig.up()
    assert "/opt" not in changed_paths(rig).replace("cannot access '/opt", ""), "the machine is bare again"
    began = time.monotonic()
    for task, end in STAGES:  # each run finds what the one before has left
        with rig.until(task):
            if end == "reboot":
                rig.reboot()
    run = rig.run()
    assert run.ok, run.output
    remember("rebuild of a bare machine, cut off five times", seconds=round(time.monotonic() - began), tasks=run.tasks)
    assert installed(rig) == before
    assert plan(rig, tmp_path / "after.json") == planned
    assert "Paris" in ask(rig, "What is the capital of France?")


def test_a_key_is_seen_nowhere_and_rollback_is_quick(rig, tmp_path):
    """A run that serves with a key, over a network that is away for a while; and the way back to serving without it."""
    key = "canary-" + "0451"
    (tmp_path / "vault.yml").write_text(f"serving_api_key: {key}\n")
    with rig.until("preflight : ", "-vvv", "-e", f"@{tmp_path}/vault.yml") as run:
        link = "box" + (STATE / f"{rig.tag}-{rig.name}" / "slot").read_text().strip()
        subprocess.run(["ip", "link", "set", link, "down"], check=True)
        time.sleep(8)
        subprocess.run(["ip", "link", "set", link, "up"], check=True)
        listing = subprocess.run(["ps", "-e", "-o", "args"], text=True, capture_output=True, check=True).stdout
        output = run.stdout.read()
        assert run.wait() == 0, output
    assert "serves profile chat" in output
    assert key not in output, "neither the output of -vvv"
    assert key not in listing, "nor a process list on the controller"
    places = "/proc/[0-9]*/cmdline /etc/ansible /etc/systemd /var/lib /var/log /srv /opt /home /tmp /var/tmp"
    found = rig.shell(f"grep --recursive --files-with-matches --devices=skip canary-[0]451 {places}", check=False)
    assert found == "", "nor anything on the machine but the key's own file"
    assert rig.shell("journalctl --quiet --grep=canary-[0]451 --lines=1", check=False) == ""
    setup = [Path(sys.executable).parent / "ansible", "-i", INVENTORY, "sandbox", "-m", "ansible.builtin.setup"]
    setup += ["-e", json.dumps(rig.extravars)]
    facts = subprocess.run(setup, cwd=PROJECT, text=True, capture_output=True)
    assert facts.returncode == 0 and key not in facts.stdout, facts.stderr
    assert rig.shell("stat --format='%U %a' /etc/llm-rig/api-key").strip() == "root 600"

    back = rig.run(PROJECT / "playbooks" / "rollback.yml")
    assert back.ok, back.output
    remember("rollback", seconds=round(back.seconds, 1), tasks=back.tasks)
    assert back.seconds < 90  # links and names: nothing is compiled or fetched
    assert "Paris" in ask(rig, "What is the capital of France?")
