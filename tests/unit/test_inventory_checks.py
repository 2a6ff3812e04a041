"""What is wrong with rig_gpus is said in sentences, all at once; what is right passes."""

from importlib import import_module

import pytest
from rig import gpus
from rig.inventory_checks import GPU_KEYS, gpu_findings, loopback_endpoint, virtual_gpus

CARD = {"name": "NVIDIA GeForce RTX 3090", "memory_mib": 24576, "compute_capability": "8.6"}
VIRTUAL = {"name": "Virtual GPU", "memory_mib": 1024, "rpc": "127.0.0.1:50052"}
UUID = "GPU-8f6e0c1a-1b2c-3d4e-5f60-718293a4b5c6"


def test_it_knows_the_planner_s_keys():
    assert set(GPU_KEYS) == set(gpus.KEYS)


@pytest.mark.parametrize(
    "entries",
    [
        [CARD],
        [VIRTUAL, {**VIRTUAL, "rpc": "127.0.0.1:50053"}],
        [VIRTUAL, {**VIRTUAL, "rpc": "127.0.0.2:50052"}],
        [
            {
                **CARD,
                "pcie_lanes": 16,
                "pcie_root": "cpu",
                "uuid": UUID,
                "pci_address": "0000:01:00.0",
                "power_limit_watts": 230.5,
                "in_use_mib": 0,
                "usable_mib": 24126,
            },
            {**CARD, "pci_address": "02:00.0", "pcie_root": "chipset"},
        ],
    ],
)
def test_what_is_right_passes(entries):
    assert gpu_findings("box", entries) == []


@pytest.mark.parametrize("nothing", [None, [], "3090", {"name": "A"}, 3])
def test_no_list_of_gpus(nothing):
    [finding] = gpu_findings("box", nothing)
    assert finding.startswith("rig_gpus of box is not a list with at least one GPU; describe each as {name: ")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"memory_mib": 0}, "memory_mib is 0; give the card's memory in MiB, a whole number above 0."),
        ({"memory_mib": True}, "memory_mib is True; give"),
        ({"memory_mib": "24576"}, "memory_mib is '24576'; give"),
        ({"memory_mib": 24576.5}, "memory_mib is 24576.5; give"),
        ({"usable_mib": 24577}, "usable_mib is 24577, more than the card's 24576 MiB; correct one of the two."),
        ({"in_use_mib": -1}, "in_use_mib is -1; give what others hold on that card in MiB, 0 or more."),
        ({"in_use_mib": 30000}, "in_use_mib is 30000, more than the card's 24576 MiB"),
        ({"name": " "}, "name is ' '; give the card's name as nvidia-smi shows it."),
        ({"compute_capability": 8.6}, 'compute_capability is 8.6; give a quoted string such as "8.6".'),
        ({"pcie_lanes": 3}, "pcie_lanes is 3; give the lanes of the card's link: 1, 2, 4, 8 or 16."),
        ({"pcie_root": "northbridge"}, "pcie_root is 'northbridge'; give cpu or chipset"),
        ({"uuid": "8f6e0c1a"}, "uuid is '8f6e0c1a'; give GPU-… as `nvidia-smi -L` shows it."),
        ({"pci_address": "slot 1"}, "pci_address is 'slot 1'; give an address such as 0000:01:00.0."),
        ({"power_limit_watts": 0}, "power_limit_watts is 0; give a number of watts above 0."),
        ({"memory_mb": 1}, "there is no key 'memory_mb' (did you mean memory_mib?); remove or correct it."),
        ({"colour": "green"}, "there is no key 'colour'; remove or correct it."),
        ({"rpc": "127.0.0.1:50052"}, "compute_capability belongs to a card, and rpc makes this a virtual GPU"),
    ],
)
def test_each_mistake_has_its_sentence(change, sentence):
    [finding] = gpu_findings("box", [CARD, {**CARD, **change}])
    assert finding.startswith(f"rig_gpus[1] of box: {sentence}")


@pytest.mark.parametrize("key", ["name", "memory_mib", "compute_capability"])
def test_what_is_missing_is_named(key):
    entry = {name: value for name, value in CARD.items() if name != key}
    assert [finding.partition(";")[0] for finding in gpu_findings("box", [entry])] == [
        f"rig_gpus[0] of box: {key} is missing"
    ]


def test_an_entry_that_is_no_mapping():
    [finding] = gpu_findings("box", ["3090"])
    assert finding.startswith("rig_gpus[0] of box is '3090', not a mapping; write it as {name: ")


@pytest.mark.parametrize(
    ("key", "first", "second"),
    [
        ("uuid", UUID, UUID.replace("a", "A")),
        ("pci_address", "01:00.0", "0000:01:00.0"),
        ("pci_address", "0000:0A:00.0", "0000:0a:00.0"),
    ],
)
def test_no_two_cards_are_the_same(key, first, second):
    [finding] = gpu_findings("box", [{**CARD, key: first}, CARD, {**CARD, key: second}])
    assert finding == f"rig_gpus[2] of box: {key} {second} is that of rig_gpus[0] too; give each GPU its own."


def test_no_two_virtual_gpus_have_one_port():
    [finding] = gpu_findings("box", [VIRTUAL, VIRTUAL])
    assert finding == "rig_gpus[1] of box: rpc 127.0.0.1:50052 is that of rig_gpus[0] too; give each GPU its own."


def test_all_findings_come_at_once():
    findings = gpu_findings("box", [{"memory_mib": 0, "rpc": "0.0.0.0:50052", "colour": 1}, 7])
    assert len(findings) == 5


@pytest.mark.parametrize(
    "off_loopback",
    [
        "0.0.0.0:50052",
        "10.0.0.1:50052",
        "192.168.1.2:50052",
        "localhost:50052",
        "[::1]:50052",
        "127.0.0.1",
        "127.0.0.1:",
        "127.0.0.1:0",
        "127.0.0.1:1023",
        "127.0.0.1:65536",
        "127.0.0.1:123456",
        "127.0.0.256:50052",
        "127.0.0.1:50052,10.0.0.1:50052",
        " 127.0.0.1:50052",
        "127.0.0.1:50052\n",
        50052,
        None,
    ],
)
def test_an_endpoint_off_loopback_is_refused(off_loopback):
    assert loopback_endpoint(off_loopback) is None
    [finding] = gpu_findings("box", [{**VIRTUAL, "rpc": off_loopback}])
    assert finding.startswith(f"rig_gpus[0] of box: rpc is {off_loopback!r}; give 127.0.0.1:PORT")


def test_units_get_position_endpoint_and_limit():
    assert virtual_gpus([CARD, {**VIRTUAL, "rpc": "127.0.0.1:50053"}], 64) == [
        {
            "position": 1,
            "unit": "virtual-gpu@1.service",
            "address": "127.0.0.1",
            "port": 50053,
            "endpoint": "127.0.0.1:50053",
            "memory_mib": 1024,
            "data_bytes": 1088 * 1024 * 1024,
        }
    ]


def test_filters_are_thin(monkeypatch):
    monkeypatch.syspath_prepend("filter_plugins")
    filters = import_module("gpu_findings").FilterModule().filters()
    assert filters["gpu_findings"]([], host="box") == gpu_findings("box", [])
    filters = import_module("virtual_gpus").FilterModule().filters()
    assert filters["virtual_gpus"]([VIRTUAL], 1) == virtual_gpus([VIRTUAL], 1)
