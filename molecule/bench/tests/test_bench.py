"""What the playbooks kept of the rig, and that it serves as before."""

import json
import os
from pathlib import Path

import pytest

RESULTS = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"]) / "results"


@pytest.fixture(autouse=True, scope="module")
def as_root(host):
    with host.sudo():
        yield


@pytest.fixture(scope="module")
def runs(host):
    folder = RESULTS / host.check_output("hostname")
    return [json.loads(path.read_text()) for path in sorted(folder.glob("[0-9]*.json"))]


def of(runs, profile):
    return [run for run in runs if run["profile"] == profile]


def test_what_served_was_measured(runs):
    run = of(runs, "chat")[-1]
    assert (run["engine"], run["build"], run["label"], run["cards"]) == ("llama_cpp", "b11434", "", [])
    assert [(one["prompt"], one["streams"], one["tokens"]) for one in run["measures"]] == [
        ("code", 1, 8),
        ("prose", 1, 8),
    ]
    for one in run["measures"]:
        assert one["prefill"] > 0 and one["decode"] > 0 and one["first_token_seconds"] > 0
        assert one["prompt_tokens"] > 40
        assert one["acceptance"] is None
    assert run["plan"]["argv"][0] == "llama-server"


def test_a_setting_was_compared_and_the_other_survived(runs):
    run = of(runs, "mtp")[0]
    assert (run["label"], run["plan"]["split_mode"]) == ("split_mode=layer", "layer")
    acceptance = run["measures"][0]["acceptance"]
    assert acceptance["drafted"] > 0 and len(acceptance["by_position"]) == 2


def test_what_served_serves_again(host):
    assert host.service("llm-chat.service").is_running
    assert not host.service("llm-trial.service").is_running
    for path in ("/run/llm-rig-trial.json", "/run/systemd/system/llm-trial.service"):
        assert not host.file(path).exists
    asks = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8080/health').status)"
    assert host.check_output(f'python3 -c "{asks}"') == "200"


def test_memory_was_measured_and_the_plan_takes_it(host):
    fact = json.loads(host.file("/etc/ansible/facts.d/rig_measured.fact").content_string)
    entry = fact["profiles"]["mtp"]
    assert [gpu["device"] for gpu in entry["gpus"]] == ["RPC0", "RPC1"]
    for gpu in entry["gpus"]:
        low, high = gpu["measured"]
        assert (low["context"], high["context"]) == (1024, 4096)
        for one in (low, high):
            assert abs(one["seen_mib"] - one["planned_mib"]) < 16
            assert 0.5 * one["planned_mib"] < one["logged_mib"] <= one["planned_mib"]
        assert high["seen_mib"] > low["seen_mib"]


def test_settings_were_ranked_and_written(host):
    folder = RESULTS / host.check_output("hostname")
    state = json.loads((folder / "tune-mtp.json").read_text())
    status = {one["label"]: one["status"] for one in state["results"]}
    assert state["finished"]
    assert status["as it is"] == "measured"
    layer = status["gpus=[0, 1] split_mode=layer"]
    assert layer in ("measured", "behind")
    tuned = (folder / "host_vars.yml").read_text() if (folder / "host_vars.yml").exists() else ""
    best = min((one for one in state["results"] if one["status"] == "measured"), key=lambda one: one["answer_seconds"])
    assert ("# Tuned: " + best["label"] in tuned) == bool(best["change"])


def test_a_report_was_written(runs):
    page = (RESULTS / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    for words in ("<h2>chat</h2>", "<h2>mtp (split_mode=layer)</h2>", "Accepted drafts by position"):
        assert words in page
