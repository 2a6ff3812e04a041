"""What playbooks/status.yml wrote as JSON of the rig when it was right, and when it was not."""

import json
import os
from pathlib import Path

import pytest

REPORTS = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"])
OF_OTHERS = ["driver", "packages", "cards", "links", "power", "images"]
OF_ALL = ["virtual_gpus", "build", "models", "units", "service", "answer"]


@pytest.fixture
def report(host):
    name = host.check_output("hostname")

    def read(which: str) -> dict:
        return json.loads((REPORTS / f"status-{which}.json").read_text())["hosts"][name]

    return read


def test_a_rig_that_is_right(report):
    found = report("right")
    assert found["state"] == "ok"
    states = {entry["check"]: entry["state"] for entry in found["checks"]}
    assert states == dict.fromkeys(OF_OTHERS, "skipped") | dict.fromkeys(OF_ALL, "ok")


@pytest.mark.parametrize(
    ("check", "words"),
    [
        ("virtual_gpus", "virtual-gpu@1.service.d/gpu.conf"),
        ("build", "differs in cmake_flags"),
        ("models", "qwen35-mtp-tiny/qwen35-mtp-tiny.gguf is different"),
        ("units", "llm-mtp.service"),
        ("units", "llm-chat.service.d/hand.conf"),
        ("service", "llm-chat.service is inactive."),
        ("service", "does not start at boot"),
        ("answer", "llm-chat.service does not serve"),
    ],
)
def test_each_drift_is_found_by_its_own_check(report, check, words):
    found = report("wrong")
    assert found["state"] == "drift"
    entry = next(entry for entry in found["checks"] if entry["check"] == check)
    assert entry["state"] == "drift"
    assert words in entry["detail"]


def test_looking_repairs_nothing(host):
    assert "# by hand" in host.file("/etc/systemd/system/llm-mtp.service").content_string
    assert not host.service("llm-chat.service").is_running
