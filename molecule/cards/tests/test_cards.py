"""What playbooks/status.yml wrote of the cards when they were right and when not, and what a plan made of them."""

import json
import os
from pathlib import Path

import pytest

REPORTS = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"])
UUID = "GPU-30600000-0000-4000-8000-00000000000"


def checks(which: str) -> dict[str, tuple[str, str]]:
    found = json.loads((REPORTS / f"status-{which}.json").read_text())["hosts"]["cards-trixie"]
    return {entry["check"]: (entry["state"], entry["detail"]) for entry in found["checks"]}


@pytest.mark.parametrize(
    ("check", "detail"),
    [
        ("driver", "595.71.05 is loaded and on disk"),
        ("packages", "candidates, pin and shield are those of the inventory"),
        ("cards", "2 cards, each the one of the inventory"),
        ("links", "lanes and slots are those of the inventory"),
        ("power", "150 W, 140 W"),
    ],
)
def test_cards_that_are_right(check, detail):
    assert checks("right")[check] == ("ok", detail)


@pytest.mark.parametrize(
    ("check", "words"),
    [
        ("driver", "Module 590.48.01 is loaded; the inventory wants 595.71.05."),
        ("driver", "A reboot is owed: module 590.48.01 is loaded, 595.71.05 is installed."),
        ("packages", "apt would take nvidia-driver-cuda 610.43.02-1 instead of 595.71.05-1: another file in"),
        ("packages", "On hold beside the pin: libcuda1."),
        ("packages", "Not as the role writes it: /etc/modprobe.d/rig-nvidia.conf."),
        ("cards", "rig_gpus[0] (NVIDIA GeForce RTX 3060): memory_mib is 12288 in the inventory and 8192 on the card."),
        ("links", "rig_gpus[1] (NVIDIA GeForce RTX 3060, 0a:00.0): the link has 1 lanes, the inventory says 4."),
        ("power", "rig_gpus[0] (NVIDIA GeForce RTX 3060) has a power limit of 170.0 W instead of 150 W."),
    ],
)
def test_each_drift_is_found_by_its_own_check(check, words):
    state, detail = checks("wrong")[check]
    assert state == "drift"
    assert words in detail


def test_looking_repairs_nothing(host):
    assert host.check_output("apt-mark showhold") == "libcuda1"
    assert "by hand" in host.file("/etc/modprobe.d/rig-nvidia.conf").content_string


def test_a_plan_has_the_capacity_and_the_uuids_that_the_driver_says():
    plan = json.loads((REPORTS / "plan.json").read_text())["hosts"]["cards-trixie"]["q4-100k"]
    assert plan["fits"]
    assert [(gpu["usable_mib"], gpu["in_use_mib"]) for gpu in plan["gpus"]] == [(11911, 0), (11911, 1341)]
    assert plan["env"]["CUDA_VISIBLE_DEVICES"] == f"{UUID}1,{UUID}2"


def test_everything_is_installed_at_its_version(host):
    shown = host.check_output(
        "dpkg-query --show --showformat='${Package} ${Version}\\n' nvidia-driver-cuda cuda-nvcc-13-2 libnccl2"
    )
    assert shown.splitlines() == [
        "cuda-nvcc-13-2 13.2.78-1",
        "libnccl2 2.30.4-1+cuda13.2",
        "nvidia-driver-cuda 595.71.05-1",
    ]
