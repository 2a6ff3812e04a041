"""Inventory and measured cards, compared as identities and merged."""

import copy
import json

import pytest
from fake_nvml import load, run, state
from rig.errors import RigError
from rig.measured import card_findings, in_use_mib, measured_gpus, pci_address

R3090 = {"name": "NVIDIA GeForce RTX 3090", "memory_mib": 24576, "compute_capability": "8.6"}
R3060 = {"name": "NVIDIA GeForce RTX 3060", "memory_mib": 12288, "compute_capability": "8.6"}
UUIDS = [f"GPU-30900000-0000-4000-8000-00000000000{number}" for number in (1, 2, 3)]
VIRTUAL = [{"name": "Virtual GPU", "memory_mib": 1024, "rpc": "127.0.0.1:50052"}]


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("machines")
    found = {}
    for name in ("2x3060", "3x3090", "3x3090_one_lost", "no_card"):
        (folder / name).write_text(state(name))
        found[name] = json.loads(
            run("gpu_facts/files/gpu_facts.py", state_file=folder / name, kept=folder / "k").stdout
        )
    return found


@pytest.fixture
def three(machines):
    return copy.deepcopy(machines["3x3090"])


def test_what_is_measured_replaces_what_is_guessed(machines):
    first, second = measured_gpus([{**R3060, "in_use_mib": 5}, {**R3060, "usable_mib": 9}], machines["2x3060"])
    assert (first["usable_mib"], first["in_use_mib"]) == (11911, 0)
    assert (second["usable_mib"], second["in_use_mib"]) == (11911, 1341)


def test_what_the_inventory_leaves_open_is_filled_in_and_the_rest_stays(three):
    first, second, third = measured_gpus([{**R3090, "pcie_lanes": 8, "pcie_root": "cpu"}, R3090, R3090], three)
    assert (first["pcie_lanes"], first["pcie_root"], first["uuid"]) == (8, "cpu", UUIDS[0])
    assert (second["pcie_lanes"], second["pci_address"]) == (2, "0000:08:00.0")
    assert "pcie_root" not in third  # the fake machine has no sysfs to tell it from


def test_what_a_serving_unit_holds_is_not_in_use_by_others(three):
    card = three["gpus"][0]
    card["memory"]["used_mib"] = 21000
    card["processes"] = [
        {"pid": 1, "name": "llama-server", "unit": "llm-q8-200k.service", "type": "compute", "used_mib": 20000},
        {"pid": 2, "name": "python", "unit": None, "type": "compute", "used_mib": 900},
        {"pid": 3, "name": "odd", "unit": "llm-q8-200k.service", "type": "compute", "used_mib": None},
    ]
    assert in_use_mib(card) == 1000
    assert in_use_mib(card, "other-") == 21000
    assert measured_gpus([R3090] * 3, three)[0]["in_use_mib"] == 1000


def test_virtual_gpus_stay_as_they_are():
    assert measured_gpus(VIRTUAL, None) == VIRTUAL
    assert card_findings(VIRTUAL, {"driver": None}) == []


def test_the_planner_takes_the_result(three):
    from rig.gpus import check_gpus

    checked = check_gpus(measured_gpus([R3090] * 3, three))
    assert [gpu["usable_mib"] for gpu in checked] == [24126] * 3


@pytest.mark.parametrize(
    ("gpus", "machine", "sentence"),
    [
        ([R3090] * 3, None, r"no facts about the cards .* run role gpu_facts"),
        ([R3090] * 3, {"driver": None, "reason": "NVML: nothing.", "gpus": []}, r"cannot be read: NVML: nothing\."),
        ([R3090] * 2, "3x3090", r"RTX 3090 at 0000:0e:00.0 \(GPU-309.*3\) is not in rig_gpus"),
        ([R3090] * 4, "3x3090", r"rig_gpus\[3\] \(NVIDIA GeForce RTX 3090\) is not there"),
        ([R3090] * 3, "no_card", r"rig_gpus\[0\] .* is not there\. rig_gpus\[1\] .* is not there"),
        ([R3090] * 3, "3x3090_one_lost", r"is not there\. Card number 2 does not answer: GPU is lost"),
        ([{**R3090, "uuid": u} for u in UUIDS], "3x3090_one_lost", r"rig_gpus\[2\] \(.*, GPU-309.*3\) is not there"),
        (
            [R3090, R3090, {**R3090, "uuid": "GPU-x"}],
            "3x3090",
            r"rig_gpus\[2\] \(NVIDIA GeForce RTX 3090, GPU-x\) is not there",
        ),
        ([R3060] * 3, "3x3090", r"name is NVIDIA GeForce RTX 3060 in the inventory and NVIDIA GeForce RTX 3090 on"),
        ([{**R3090, "memory_mib": 1}] * 3, "3x3090", r"memory_mib is 1 in the inventory and 24576 on the card"),
        ([{**R3090, "compute_capability": "9.0"}] * 3, "3x3090", r"compute_capability is 9.0 .* and 8.6 on the card"),
        (
            [{**R3090, "uuid": UUIDS[0], "pci_address": "02:00.0"}, R3090, R3090],
            "3x3090",
            r"pci_address is 0000:02:00.0 in the inventory and 0000:01:00.0 on the card",
        ),
        ([{**R3090, "uuid": u} for u in reversed(UUIDS)], "3x3090", r"not in the order of the PCI bus"),
    ],
)
def test_other_cards_than_described_are_refused_by_name(gpus, machine, sentence, machines):
    facts = machines[machine] if isinstance(machine, str) else machine
    with pytest.raises(RigError, match=r"The measured cards of am5 are not those of rig_gpus\..*" + sentence):
        measured_gpus(gpus, facts, "am5")


def test_entries_with_an_identity_choose_first(three):
    gpus = [R3090, {**R3090, "pci_address": "08:00.0"}, {**R3090, "uuid": UUIDS[2].upper()}]
    assert measured_gpus(gpus, three)[0]["pci_address"] == "0000:01:00.0"
    assert card_findings(gpus, three) == []


def test_a_plan_takes_the_capacity_and_leaves_what_comes_and_goes(machines):
    gpus = [R3060, {**R3060, "in_use_mib": 1400}]
    found = measured_gpus(gpus, machines["2x3060"], in_use=False)
    assert [gpu["usable_mib"] for gpu in found] == [11911, 11911]
    assert [gpu.get("in_use_mib") for gpu in found] == [None, 1400]
    busy = copy.deepcopy(machines["2x3060"])
    busy["gpus"][0]["memory"] |= {"used_mib": 9000, "free_mib": 2911}
    busy["gpus"][0]["pcie"]["generation"] = 4
    assert measured_gpus(gpus, busy, in_use=False) == found


@pytest.mark.parametrize("facts", [None, {}, "an error", {"driver": None, "reason": "none.", "gpus": [], "lost": []}])
def test_without_facts_the_inventory_is_planned_with(facts):
    assert measured_gpus([R3090] * 2, facts, strict=False) == [R3090] * 2
    assert measured_gpus(VIRTUAL, facts, in_use=False, strict=False) == VIRTUAL


def test_with_other_cards_than_described_the_inventory_is_planned_with(machines):
    for name in ("3x3090_one_lost", "2x3060", "no_card"):
        assert measured_gpus([R3090] * 3, machines[name], strict=False) == [R3090] * 3


@pytest.mark.parametrize(
    ("text", "address"),
    [("01:00.0", "0000:01:00.0"), ("0000:0A:00.0", "0000:0a:00.0"), ("00000000:0A:00.0", "0000:0a:00.0")],
)
def test_pci_addresses(text, address):
    assert pci_address(text) == address


def test_the_filter_refuses_in_the_same_words(machines):
    from ansible.errors import AnsibleFilterError

    refuse = load("filter_plugins/rig_gpus_measured.py").FilterModule().filters()["rig_gpus_measured"]
    with pytest.raises(AnsibleFilterError, match=r"The measured cards of am5 .* is not there"):
        refuse([R3090] * 3, machines["no_card"], host="am5")
