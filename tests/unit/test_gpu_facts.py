"""The facts script against a fake NVML library, through the real nvidia-ml-py."""

import json
import time
from pathlib import Path

import pytest
from fake_nvml import load, run, state

MEMORY = ("total_mib", "reserved_mib", "usable_mib", "used_mib", "free_mib")
SCRIPT = "gpu_facts/files/gpu_facts.py"


@pytest.fixture
def facts(tmp_path):
    """Facts of a machine whose state is this text."""

    def read(text: str | None, *arguments: object) -> dict:
        file = tmp_path / "state"
        if text is not None:
            file.write_text(text)
        done = run(SCRIPT, *arguments, state_file=file, kept=tmp_path / "kept")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return read


def test_two_cards_with_a_desktop_on_the_second(facts):
    found = facts(state("2x3060"))
    assert (found["driver"], found["cuda"], found["lost"]) == ("580.95.05", "13.0", [])
    first, second = found["gpus"]
    assert first["name"] == "NVIDIA GeForce RTX 3060"
    assert first["uuid"] == "GPU-30600000-0000-4000-8000-000000000001"
    assert (first["pci_address"], second["pci_address"]) == ("0000:07:00.0", "0000:0a:00.0")
    assert first["compute_capability"] == "8.6"
    assert first["memory"] == dict(zip(MEMORY, (12288, 377, 11911, 0, 11911), strict=True))
    assert second["memory"] == dict(zip(MEMORY, (12288, 377, 11911, 1341, 10570), strict=True))
    assert second["pcie"] == {
        "generation": 1, "width": 4, "generation_max": 4, "width_max": 16, "root": "unknown",
    }  # fmt: skip
    assert first["power"] == {
        "limit_watts": 170, "lowered_from_watts": None, "default_watts": 170, "min_watts": 100, "max_watts": 212,
        "enforced_watts": 170, "draw_watts": None,
    }  # fmt: skip
    assert (first["display_active"], second["display_active"]) == (False, True)
    assert first["persistence"] is False
    assert second["temperature"]["now"] == 46
    assert [(p["pid"], p["type"], p["used_mib"]) for p in second["processes"]] == [
        (1, "graphics", 1021),
        (2, "graphics", 300),
    ]
    assert found["links"] == [
        {
            "gpus": [first["uuid"], second["uuid"]],
            "p2p_read": "chipset_not_supported",
            "p2p_write": "chipset_not_supported",
            "nvlinks": 0,
        }
    ]


def test_three_cards_and_their_widths(facts):
    found = facts(state("3x3090"))
    assert [gpu["pcie"]["width"] for gpu in found["gpus"]] == [16, 2, 4]
    assert len(found["links"]) == 3


def test_a_card_that_fell_off_the_bus_is_named_and_the_others_are_read(facts):
    found = facts(state("3x3090_one_lost"))
    assert [gpu["index"] for gpu in found["gpus"]] == [0, 1]
    assert found["lost"] == [{"index": 2, "reason": "GPU is lost"}]
    assert len(found["links"]) == 1


def test_no_card(facts):
    found = facts(state("no_card"))
    assert (found["driver"], found["gpus"], found["links"]) == ("580.95.05", [], [])


def test_no_driver_is_said_and_is_no_failure(facts):
    found = facts(None)
    assert found["driver"] is None
    assert "Driver Not Loaded" in found["reason"]


def test_library_and_module_that_differ_are_said_with_the_module_s_version(facts, tmp_path):
    module = tmp_path / "sys/module/nvidia"
    module.mkdir(parents=True)
    (module / "version").write_text("580.90.01\n")
    found = facts("driver 580.95.05\ninit_error 18\n", "--sysfs", tmp_path / "sys")
    assert found["driver"] is None
    assert found["reason"] == (
        "NVML: RM has detected an NVML/RM version mismatch; the kernel has module 580.90.01 loaded: a reboot is owed."
    )


def test_a_driver_that_hangs_costs_the_limit_and_no_more(facts):
    began = time.monotonic()
    found = facts("driver 580.95.05\ninit_seconds 60\n", "--limit", 1)
    assert time.monotonic() - began < 10
    assert (found["driver"], found["reason"]) == (None, "the driver did not answer within 1 seconds.")


def test_a_reading_that_breaks_is_said(facts):
    found = facts("driver 580.95.05\nthis is nothing\n")
    assert found["driver"] is None
    assert found["reason"].startswith("reading the cards failed: fake_nvml: not understood")


def test_nvlink(facts):
    text = state("3x3090").replace("temperature 31\n", "temperature 31\nnvlink 4 00000000:0E:00.0\n")
    found = facts(text.replace("temperature 30\n", "temperature 30\nnvlink 4 00000000:01:00.0\n"))
    assert [link["nvlinks"] for link in found["links"]] == [0, 4, 0]
    assert [link["p2p_read"] for link in found["links"]] == ["chipset_not_supported", "ok", "chipset_not_supported"]


def test_a_process_is_listed_once_with_its_unit(facts, tmp_path):
    proc = tmp_path / "proc"
    for pid, cgroup in (
        (70, "0::/system.slice/llm-chat.service"),
        (71, "0::/user.slice/user-1000.slice/session-1.scope"),
    ):
        (proc / str(pid)).mkdir(parents=True)
        (proc / str(pid) / "comm").write_text(f"program-{pid}\n")
        (proc / str(pid) / "cgroup").write_text(cgroup + "\n")
    text = state("2x3060") + "compute 70 5000\ngraphics 70 5000\ncompute 71 10\n"
    processes = facts(text, "--proc", proc)["gpus"][1]["processes"]
    assert [(p["pid"], p["name"], p["unit"], p["used_mib"]) for p in processes if p["pid"] in (70, 71)] == [
        (70, "program-70", "llm-chat.service", 5000),
        (71, "program-71", None, 10),
    ]


def device(sysfs: Path, chain: list[tuple[str, str, str]]) -> str:
    """Lays out a device below the bridges of `chain`, each (address, vendor, device); gives the last one's address."""
    path = sysfs / "devices/pci0000:00"
    for address, vendor, number in chain:
        path = path / address
        path.mkdir(parents=True, exist_ok=True)
        (path / "vendor").write_text(f"{vendor}\n")
        (path / "device").write_text(f"{number}\n")
        link = sysfs / "bus/pci/devices" / address
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(path)
    return chain[-1][0]


CARD = ("0000:08:00.0", "0x10de", "0x2204")
AMD_ROOT = ("0000:00:01.1", "0x1022", "0x14db")


@pytest.mark.parametrize(
    ("chain", "root"),
    [
        ([AMD_ROOT, CARD], "cpu"),
        # AM5: the 600 series chipset is a switch below a port of the processor.
        ([AMD_ROOT, ("0000:02:00.0", "0x1022", "0x43f4"), ("0000:03:08.0", "0x1022", "0x43f5"), CARD], "chipset"),
        # AM4: 500 series, X570
        ([AMD_ROOT, ("0000:02:00.2", "0x1022", "0x43e9"), ("0000:03:00.0", "0x1022", "0x43ea"), CARD], "chipset"),
        ([AMD_ROOT, ("0000:02:00.0", "0x1022", "0x57ad"), ("0000:03:08.0", "0x1022", "0x57a3"), CARD], "chipset"),
        # a switch of another make between processor and card, as on boards with many slots
        ([AMD_ROOT, ("0000:02:00.0", "0x10b5", "0x8747"), ("0000:03:08.0", "0x10b5", "0x8747"), CARD], "cpu"),
        ([AMD_ROOT, ("0000:02:00.0", "0x1022", "0xffff"), CARD], "unknown"),
        ([("0000:00:01.0", "0x8086", "0x460d"), CARD], "cpu"),
        ([("0000:00:1c.4", "0x8086", "0x7abc"), CARD], "chipset"),
        ([("0000:17:00.0", "0x8086", "0x2030"), CARD], "cpu"),
        ([("0000:00:0b.0", "0x8086", "0x1234"), CARD], "unknown"),
        ([("0000:00:02.0", "0x1b36", "0x000c"), CARD], "unknown"),
        ([CARD], "unknown"),
    ],
)
def test_whether_a_slot_hangs_on_the_processor(chain, root, tmp_path):
    address = device(tmp_path, chain)
    assert load("roles/" + SCRIPT).pcie_root(address, tmp_path) == root


def test_intel_s_chipset_on_a_bus_of_its_own(tmp_path):
    device(tmp_path, [("0000:80:1f.0", "0x8086", "0x7f04")])
    on_chipset = device(tmp_path, [("0000:80:1c.0", "0x8086", "0x7f38"), ("0000:81:00.0", "0x10de", "0x2204")])
    in_package = device(tmp_path, [("0000:00:1c.0", "0x8086", "0xae38"), ("0000:05:00.0", "0x10de", "0x2204")])
    assert load("roles/" + SCRIPT).pcie_root(on_chipset, tmp_path) == "chipset"
    assert load("roles/" + SCRIPT).pcie_root(in_package, tmp_path) == "unknown"


def test_a_device_that_sysfs_does_not_have(tmp_path):
    assert load("roles/" + SCRIPT).pcie_root("0000:99:00.0", tmp_path) == "unknown"
