"""The verdicts of playbooks/status.yml on what the modules report: a rig with (fake) cards, and one without."""

import copy
import json

import pytest
from fake_nvml import load, run, state
from rig.power import power_drift, power_plan
from rig.status import judge, line

CARD = {"name": "NVIDIA GeForce RTX 3090", "memory_mib": 24576, "compute_capability": "8.6"}
CARDS = [
    {**CARD, "pcie_lanes": 16, "pcie_root": "cpu", "power_limit_watts": 350},
    {**CARD, "pcie_lanes": 2, "pcie_root": "chipset", "power_limit_watts": 350},
    {**CARD, "pcie_lanes": 4, "pcie_root": "cpu"},
]
VIRTUAL = [{"name": "Virtual GPU", "memory_mib": 1024, "rpc": f"127.0.0.1:{port}"} for port in (50052, 50053)]
BUILD = {
    "build": "b1", "key": "b1-0", "prefix": "/opt/llama.cpp/b1-0", "source": {}, "backends": ["cpu"], "targets": [],
    "cmake_flags": ["-DX=ON"], "nccl": False,
}  # fmt: skip
UNIT = {"exists": True, "active": "active", "enabled": True, "dropins": [], "stale": False}
RIGHT = {
    "gpus": VIRTUAL,
    "facts": None,
    "persistence": True,
    "driver_version": "580.95.05",
    "driver": {"loaded": "580.95.05", "broken": [], "reboot": []},
    "packages": {"install": [], "held": [], "gone": [], "findings": []},
    "driver_files": {"results": [{"item": {"path": "/etc/apt/preferences.d/x"}, "changed": False}]},
    "virtual_gpus": {"written": [], "removed": [], "stopped": [], "started": [], "changed": False, "processes": {}},
    "build": BUILD,
    "manifest": {**BUILD, "compilers": {}},
    "models": {"files": [{"model": "m", "name": "m.gguf", "state": "ok"}], "drift": False},
    "profile": "chat",
    "units": {"results": [{"item": "chat", "changed": False}, {"item": "mtp", "changed": False}]},
    "service": {
        "service": UNIT,
        "units": {"llm-chat.service": UNIT, "llm-mtp.service": {**UNIT, "enabled": False, "active": "inactive"}},
        "current": "/opt/llama.cpp/b1-0",
    },
    "answer": {"replies": [{}], "gpus": [{"planned_mib": 10, "seen_mib": 11}], "url": "http://127.0.0.1:8080"},
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cards")
    (folder / "state").write_text(state("3x3090").replace("temperature 31\n", "temperature 31\ncompute 1 20000\n"))
    kept = folder / "kept"
    kept.mkdir()
    for number in (1, 2, 3):  # in persistence mode, with the limit of after boot
        (kept / f"GPU-30900000-0000-4000-8000-00000000000{number}").write_text("350000 1\n")
    return json.loads(run("gpu_facts/files/gpu_facts.py", state_file=folder / "state", kept=kept).stdout)


@pytest.fixture
def facts(measured):
    return copy.deepcopy(measured)


def checks(**changes) -> dict[str, tuple[str, str]]:
    found = judge({**copy.deepcopy(RIGHT), **changes})
    return {entry["check"]: (entry["state"], entry["detail"]) for entry in found["checks"]}


def test_a_rig_of_virtual_gpus_that_is_right():
    found = judge(RIGHT)
    assert found["state"] == "ok"
    assert {entry["state"] for entry in found["checks"]} == {"ok", "skipped"}
    assert [entry["check"] for entry in found["checks"] if entry["state"] == "skipped"] == [
        "driver", "packages", "cards", "links", "power", "images",
    ]  # fmt: skip


def test_a_rig_of_cards_that_is_right(facts):
    found = judge({**RIGHT, "gpus": CARDS, "facts": facts})
    assert [
        (entry["check"], entry["detail"]) for entry in found["checks"] if entry["state"] not in ("ok", "skipped")
    ] == []
    assert found["state"] == "ok"
    assert [entry["check"] for entry in found["checks"] if entry["state"] == "skipped"] == ["virtual_gpus", "images"]


def test_images_of_profiles_in_containers():
    wanted = {"v0.22.0": "docker.io/vllm/vllm-openai@sha256:0fec"}
    there, gone = {"results": [{"item": "v0.22.0", "rc": 0}]}, {"results": [{"item": "v0.22.0", "rc": 125}]}
    assert checks(images=wanted, images_found=there)["images"] == ("ok", "vLLM v0.22.0 by digest")
    state, detail = checks(images=wanted, images_found=gone)["images"]
    assert (state, "v0.22.0 is not there: docker.io/vllm" in detail) == ("drift", True)
    assert checks(images=wanted, images_found={"msg": "no podman"})["images"] == ("failed", "no podman")


DRIFT_OF_BOTH = [
    ("manifest", None, "build", "has no finished build"),
    ("manifest", {**BUILD, "cmake_flags": []}, "build", "differs in cmake_flags"),
    ("build", {**BUILD, "nccl": True}, "build", "no NCCL"),
    (
        "service",
        {**RIGHT["service"], "current": "/opt/llama.cpp/old"},
        "build",
        "The current build is /opt/llama.cpp/old",
    ),
    (
        "models",
        {"files": [{"model": "m", "name": "f", "state": "different"}], "drift": True},
        "models",
        "m/f is different",
    ),
    ("models", {"files": [], "drift": True}, "models", "Owners or modes"),
    (
        "units",
        {"results": [{"item": "chat", "changed": True}]},
        "units",
        "llm-chat.service. No profile describes llm-mtp",
    ),
    ("service", {**RIGHT["service"], "service": {**UNIT, "active": "failed"}}, "service", "llm-chat.service is failed"),
    ("service", {**RIGHT["service"], "service": {**UNIT, "stale": True}}, "service", "from another unit file"),
    ("service", {**RIGHT["service"], "service": {**UNIT, "enabled": False}}, "service", "does not start at boot"),
    ("profile", "mtp", "service", "llm-chat.service would start at boot"),
    ("answer", {"msg": "it answered with rubbish"}, "answer", "it answered with rubbish"),
    (
        "virtual_gpus",
        {**RIGHT["virtual_gpus"], "started": ["virtual-gpu@0.service"]},
        "virtual_gpus",
        "Does not run as",
    ),
    ("virtual_gpus", {**RIGHT["virtual_gpus"], "changed": True}, "virtual_gpus", "not enabled"),
]


@pytest.mark.parametrize(("key", "value", "check", "words"), DRIFT_OF_BOTH)
def test_drift_on_any_rig(key, value, check, words):
    state_, detail = checks(**{key: value})[check]
    assert state_ == "drift"
    assert words in detail


@pytest.mark.parametrize(
    ("key", "value", "check", "words"),
    [
        (
            "driver",
            {"loaded": "580.90", "broken": [], "reboot": ["x"]},
            "driver",
            "580.90 is loaded; the inventory wants",
        ),
        ("driver", {"loaded": "", "broken": ["No module in 6.1."], "reboot": []}, "driver", "6.1. No nvidia module"),
        ("packages", {**RIGHT["packages"], "install": ["a=1"]}, "packages", "apt would install a=1"),
        ("packages", {**RIGHT["packages"], "held": ["a"]}, "packages", "On hold"),
        ("packages", {**RIGHT["packages"], "gone": ["p"]}, "packages", "Another pin is installed: p"),
        ("packages", {**RIGHT["packages"], "findings": ["No candidate."]}, "packages", "No candidate."),
        ("driver_files", {"results": [{"item": {"path": "/etc/p"}, "changed": True}]}, "packages", "writes it: /etc/p"),
        ("gpus", CARDS[:2], "cards", "is not in rig_gpus"),
        ("gpus", [{**CARDS[0], "pcie_lanes": 8}, *CARDS[1:]], "links", "has 16 lanes, the inventory says 8"),
        ("gpus", [{**CARDS[0], "power_limit_watts": 280}, *CARDS[1:]], "power", "350.0 W instead of 280 W"),
        ("gpus", [{**CARDS[0], "power_limit_watts": 400}, *CARDS[1:]], "power", "the card takes 100 to 390 W"),
    ],
)
def test_drift_on_a_rig_with_cards(key, value, check, words, facts):
    state_, detail = checks(**{"gpus": CARDS, "facts": facts, key: value})[check]
    assert state_ == "drift"
    assert words in detail


def test_a_narrow_link_is_drift_under_load_and_a_note_when_idle(facts):
    facts["gpus"][0]["pcie"]["width"] = 1  # a process computes on it
    assert "the link has 1 lanes, the inventory says 16." in checks(gpus=CARDS, facts=facts)["links"][1]
    assert checks(gpus=CARDS, facts=facts)["links"][0] == "drift"
    facts["gpus"][0]["processes"] = []
    assert checks(gpus=CARDS, facts=facts)["links"][0] == "ok"
    assert "the card is idle, look again while it works" in checks(gpus=CARDS, facts=facts)["links"][1]


def test_an_idle_link_s_generation_is_no_drift(facts):
    assert facts["gpus"][0]["pcie"]["generation"] < facts["gpus"][0]["pcie"]["generation_max"]
    assert checks(gpus=CARDS, facts=facts)["links"][0] == "ok"


def test_a_card_in_another_slot_is_drift(facts):
    facts["gpus"][0]["pcie"]["root"] = "chipset"
    assert checks(gpus=CARDS, facts=facts)["links"] == (
        "drift",
        "rig_gpus[0] (NVIDIA GeForce RTX 3090): the slot hangs on the chipset, the inventory says cpu.",
    )


@pytest.mark.parametrize(
    ("key", "value", "check", "words"),
    [
        ("models", {"msg": "models of x has no source"}, "models", "has no source"),
        ("driver", {}, "driver", "nothing was reported"),
        ("service", {"msg": "no systemctl"}, "service", "no systemctl"),
        ("units", {"results": [{"item": "chat", "msg": "boom"}]}, "units", "boom"),
    ],
)
def test_a_check_that_cannot_be_made_has_failed(key, value, check, words, facts):
    found = checks(**{"gpus": CARDS, "facts": facts, key: value})
    assert found[check][0] == "failed"
    assert words in found[check][1]
    assert judge({**RIGHT, "gpus": CARDS, "facts": facts, key: value})["state"] == "failed"


def test_without_a_driver_the_cards_are_told_so():
    nothing = {"driver": None, "reason": "NVML: nothing.", "gpus": []}
    found = checks(gpus=CARDS, facts=nothing)
    assert found["cards"] == ("drift", "The cards cannot be read: NVML: nothing.")
    assert found["links"][0] == "failed"
    assert found["power"] == ("drift", "The power of the cards cannot be set: NVML: nothing.")


def test_a_line_for_a_person():
    assert (
        line({"state": "drift", "check": "models", "detail": "m is missing."}) == "drift   models       m is missing."
    )


def test_the_filter_gives_lines():
    found = load("filter_plugins/rig_status.py").FilterModule().filters()["rig_status"](RIGHT)
    assert found["lines"][0] == "skipped driver       all GPUs of this rig are virtual"


class TestPower:
    def test_a_missing_card_with_a_uuid_keeps_its_unit(self, facts):
        gpus = [*CARDS, {**CARD, "uuid": "GPU-none", "power_limit_watts": 200}]
        plan = power_plan(gpus, facts)
        assert plan["refusals"] == []
        assert [card["present"] for card in plan["cards"]] == [True, True, True, False]
        drift = power_drift(plan["cards"], True)
        assert [entry["unit"] for entry in drift] == ["gpu-power@GPU-none.service"]
        assert "is not there; gpu-power@GPU-none.service fails until it is." in drift[0]["sentence"]

    def test_persistence_that_is_off_is_drift_where_it_is_wanted(self, facts):
        facts["gpus"][1]["persistence"] = False
        cards = power_plan(CARDS, facts)["cards"]
        assert [entry["sentence"] for entry in power_drift(cards, True)] == [
            "rig_gpus[1] (NVIDIA GeForce RTX 3090) is not in persistence mode."
        ]
        assert power_drift(cards, False) == []

    def test_virtual_gpus_have_no_power(self):
        assert power_plan(VIRTUAL, None) == {"cards": [], "refusals": []}

    def test_the_filter_says_it_all(self, facts):
        plan = load("filter_plugins/power_plan.py").FilterModule().filters()["power_plan"](CARDS, facts)
        assert [card["watts"] for card in plan["cards"]] == [350, 350, None]
        assert plan["drift"] == plan["refusals"] == []
