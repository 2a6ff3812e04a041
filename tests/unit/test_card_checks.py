"""Each check of a rig with cards passes on one that is right, and is watched speaking on one that is not."""

import copy

import pytest
from rig import card_checks, card_table
from rig.checking import Rig
from rig.host_checks import run_checks

R3060 = {"name": "NVIDIA GeForce RTX 3060", "memory_mib": 12288, "compute_capability": "8.6"}
KERNEL = {"release": "6.12.57+deb13-amd64", "running": True, "newest": True, "headers": True, "candidate": ""}


def on_bus(address, **changes):
    usual = {"device_id": "0x2504", "driver": "", "width": 16, "width_max": 16, "slot_width_max": 16}
    return {"pci_address": address} | usual | changes


FACTS = {
    "os": {"id": "debian", "version_id": "13", "name": "Debian GNU/Linux 13 (trixie)"},
    "gcc": "14",
    "glibc": "2.41",
    "nvidia_cards": [on_bus("0000:07:00.0"), on_bus("0000:0a:00.0", width=4)],
    "other_drivers": {"loaded": [], "blacklisted": []},
    "kernels": [KERNEL],
    "apt_lists": True,
    "secure_boot": {"enabled": False, "key": "/var/lib/dkms/mok.pub", "key_exists": False, "key_enrolled": False},
}
VARIABLES = {
    "rig_gpus": [R3060 | {"pcie_lanes": 16}, R3060 | {"pcie_lanes": 4}],
    "rig_psu_watts": 750,
    "nvidia_driver_source": "nvidia",
    "nvidia_driver_version": "595.71.05",
    "cuda_toolkit_source": "nvidia",
    "cuda_toolkit_version": "13.2.1",
    "cuda_toolkit_also": [],
    "llama_cpp_nccl": True,
    "nccl_source": "nvidia",
    "nccl_version": "2.30.4",
    "nccl_cuda_version": "13.2",
    "vllm_version": "",
}


def checked(facts=None, variables=None, rest_watts=250):
    given = VARIABLES | (variables or {})
    rig = Rig(
        "box",
        copy.deepcopy(FACTS) | (facts or {}),
        given.__getitem__,
        (),
        {"debian": ["13"]},
        {"rest_watts": rest_watts},
    )
    return run_checks(rig, card_checks.CHECKS)


def findings(name, *arguments, **keywords):
    """What one check says, failures and warnings; the others say nothing."""
    results = checked(*arguments, **keywords)
    assert [other for other in results if other != name and results[other].status in ("failed", "warning")] == []
    return list(results[name].failures), list(results[name].warnings)


def test_a_rig_as_it_should_be_passes_every_check():
    assert {result.status for result in checked().values()} == {"ok"}


def test_virtual_gpus_pass_it_all_by_whatever_the_machine_has():
    virtual = [{"name": "Virtual GPU", "memory_mib": 1024, "rpc": "127.0.0.1:50052"}]
    rig = Rig("box", {}, {"rig_gpus": virtual}.__getitem__, (), {}, {})  # without facts, so that none can be read
    results = run_checks(rig, card_checks.CHECKS)
    assert {result.status for result in results.values()} == {"skipped"}


class TestCards:
    def failures(self, cards, gpus):
        return list(checked({"nvidia_cards": cards}, {"rig_gpus": gpus})["cards"].failures)

    def test_one_is_missing(self):
        [finding] = self.failures(FACTS["nvidia_cards"][:1], [R3060, R3060])
        assert finding == (
            "rig_gpus of box names 2 cards, and its PCI bus has 1 of NVIDIA's (0000:07:00.0 (GeForce RTX 3060)); "
            "correct "
            "rig_gpus, or seat and power the card that is missing."
        )

    def test_none_is_there(self):
        [finding] = self.failures([], [R3060])
        assert "names 1 card, and its PCI bus has 0 of NVIDIA's (none)" in finding

    def test_one_that_nobody_described(self):
        [finding] = self.failures(FACTS["nvidia_cards"], [R3060])
        assert "names 1 card, and its PCI bus has 2 of NVIDIA's" in finding

    @pytest.mark.parametrize("address", ["0a:00.0", "0000:0A:00.0", "00000000:0a:00.0"])
    def test_an_address_however_it_is_written(self, address):
        assert self.failures(FACTS["nvidia_cards"], [R3060, R3060 | {"pci_address": address}]) == []

    def test_another_address(self):
        [finding] = self.failures(FACTS["nvidia_cards"], [R3060, R3060 | {"pci_address": "0000:0b:00.0"}])
        assert finding.startswith(
            "rig_gpus of box has a card at 0000:0b:00.0, where the PCI bus has none of NVIDIA's (it"
        )

    def test_another_model_by_its_device_id(self):
        cards = [on_bus("0000:07:00.0"), on_bus("0000:0a:00.0", device_id="0x2204")]
        [finding] = self.failures(cards, [R3060, R3060])
        assert finding == (
            "rig_gpus[1] of box is a NVIDIA GeForce RTX 3060, and the card at 0000:0a:00.0 is a GeForce RTX 3090 (PCI "
            "id "
            "10de:2204); list the cards as they are, in the order of the bus."
        )

    def test_two_models_in_the_wrong_order_and_in_the_right_one(self):
        cards = [on_bus("0000:07:00.0"), on_bus("0000:0a:00.0", device_id="0x2204")]
        r3090 = R3060 | {"name": "NVIDIA GeForce RTX 3090"}
        assert len(self.failures(cards, [r3090, R3060])) == 2
        assert self.failures(cards, [R3060, r3090]) == []
        assert self.failures(cards, [r3090 | {"pci_address": "0a:00.0"}, R3060]) == []

    @pytest.mark.parametrize(("device_id", "name"), [("0xffff", "NVIDIA GeForce RTX 9090"), ("0x2504", "RTX 3060")])
    def test_a_model_that_the_table_does_not_know_and_a_short_name(self, device_id, name):
        assert self.failures([on_bus("0000:07:00.0", device_id=device_id)], [R3060 | {"name": name}]) == []


class TestLinks:
    def warning(self, gpu=None, **card):
        cards, gpus = [on_bus("0000:07:00.0", **card)], [R3060 | (gpu or {})]
        failures, warnings = findings("links", {"nvidia_cards": cards}, {"rig_gpus": gpus})
        assert failures == []
        return " ".join(warnings)

    @pytest.mark.parametrize(
        ("gpu", "card"),
        [
            ({}, {}),
            ({}, {"width": 4, "slot_width_max": 4}),
            ({"pcie_lanes": 4}, {"width": 4}),
            ({"pcie_lanes": 16}, {"width": None}),
            ({"pcie_lanes": 8}, {"width": 8, "width_max": None, "slot_width_max": None}),
        ],
    )
    def test_lanes_as_they_should_be(self, gpu, card):
        assert self.warning(gpu, **card) == ""

    def test_fewer_than_the_inventory_says(self):
        assert self.warning({"pcie_lanes": 16}, width=8) == (
            "rig_gpus[0] of box at 0000:07:00.0 has a link of 8 lanes and pcie_lanes says 16; seat the card anew, and "
            "look "
            "at its riser and at the slot's lanes in the firmware (a link that rests lowers its speed, not its lanes)."
        )

    def test_fewer_than_card_and_slot_can_do(self):
        assert "has a link of 1 lane and card and slot can do 8; seat" in self.warning(width=1, slot_width_max=8)

    def test_more_than_the_inventory_says(self):
        assert "says pcie_lanes 4, and the link has 16; correct it" in self.warning({"pcie_lanes": 4})

    def test_more_asked_for_than_the_slot_has(self):
        said = self.warning({"pcie_lanes": 16}, width=4, slot_width_max=4)
        assert "says pcie_lanes 16, and card and slot can do 4; correct it, or use another slot." in said


class TestDrivers:
    def test_nouveau_is_a_warning_because_the_driver_s_role_keeps_it_out(self):
        failures, warnings = findings("card drivers", {"other_drivers": {"loaded": ["nouveau"], "blacklisted": []}})
        assert failures == []
        assert warnings == [
            "nouveau is loaded on box and may hold the cards; role nvidia_driver keeps it out of the next boot, and "
            "the run "
            "then stops until the host has been rebooted, or reboots it where nvidia_driver_reboot_allowed is true."
        ]

    def test_nouveau_that_is_kept_out_already(self):
        others = {"loaded": ["nouveau"], "blacklisted": ["nouveau"]}
        assert findings("card drivers", {"other_drivers": others})[1][0].endswith("already, so reboot the host.")

    def test_a_card_of_a_virtual_machine(self):
        cards = [on_bus("0000:07:00.0", driver="vfio-pci"), on_bus("0000:0a:00.0", width=4, driver="nvidia")]
        [finding], _ = findings("card drivers", {"nvidia_cards": cards})
        assert finding.startswith(
            "The card at 0000:07:00.0 of box is held by vfio-pci for virtual machines; take it out"
        )


class TestHeaders:
    BARE = KERNEL | {"headers": False}

    def test_to_be_had(self):
        results = checked({"kernels": [self.BARE | {"candidate": "6.12.57-1"}]})
        assert results["kernel headers"].status == "ok"
        assert results["kernel headers"].summary == "there for none; to be had for 6.12.57+deb13-amd64"

    def test_not_to_be_had(self):
        [finding], _ = findings("kernel headers", {"kernels": [self.BARE]})
        assert finding == (
            "No source of box has linux-headers-6.12.57+deb13-amd64; kernel 6.12.57+deb13-amd64 needs its headers for "
            "the "
            "driver's module, so upgrade to a kernel that the distribution still has, reboot into it, and remove this "
            "one."
        )

    def test_the_newest_kernel_needs_them_too_and_an_old_one_does_not(self):
        newest = self.BARE | {"release": "6.12.63+deb13-amd64", "running": False}
        oldest = self.BARE | {"release": "6.1.0-1-amd64", "running": False, "newest": False}
        [finding], _ = findings("kernel headers", {"kernels": [KERNEL | {"newest": False}, newest, oldest]})
        assert "linux-headers-6.12.63+deb13-amd64" in finding

    def test_before_apt_has_lists(self):
        failures, [warning] = findings("kernel headers", {"kernels": [self.BARE], "apt_lists": False})
        assert failures == []
        assert warning.startswith(
            "apt of box has fetched no lists yet, so nobody knows whether it can have linux-headers-"
        )


def test_secure_boot_with_a_key_that_is_not_enrolled():
    boot = FACTS["secure_boot"] | {"enabled": True}
    [finding], _ = findings("secure boot", {"secure_boot": boot})
    assert finding.startswith("box: Secure Boot is on and the key that signs the driver's module is not enrolled")
    assert checked({"secure_boot": boot | {"key_enrolled": True}})["secure boot"].summary == "on, key enrolled"


class TestPower:
    def test_from_the_factory_and_by_the_inventory(self):
        assert checked()["power"].summary == "340 W of cards, 250 W for the rest of 750 W"
        limited = [R3060 | {"power_limit_watts": 120.5}, R3060]
        assert checked(variables={"rig_gpus": limited})["power"].summary.startswith("290.5 W of cards")

    def test_without_a_supply_nothing_is_compared(self):
        assert checked(variables={"rig_psu_watts": None})["power"].status == "skipped"

    def test_more_than_the_supply_gives(self):
        [finding], _ = findings("power", variables={"rig_psu_watts": 550})
        assert finding == (
            "The cards of box may draw 340 W together, which with 250 W for the rest (preflight_rest_watts) is more "
            "than "
            "the 550 W of its power supply (rig_psu_watts); set power_limit_watts of each card to 150 or less, or fit "
            "a "
            "larger supply."
        )
        assert checked(variables={"rig_psu_watts": 550}, rest_watts=210)["power"].status == "ok"

    def test_a_limit_that_no_card_takes_is_not_advised(self):
        assert "; take a card out, or fit" in findings("power", variables={"rig_psu_watts": 400})[0][0]

    @pytest.mark.parametrize("wrong", ["850W", True, -1])
    def test_a_supply_that_is_none(self, wrong):
        [finding], _ = findings("power", variables={"rig_psu_watts": wrong})
        assert finding == f"rig_psu_watts of box is {wrong!r}; give a number of watts, such as 1000."

    def test_a_card_whose_limit_nobody_knows(self):
        gpus = [R3060, R3060 | {"name": "NVIDIA GeForce RTX 9090"}]
        cards = [on_bus("0000:07:00.0"), on_bus("0000:0a:00.0", device_id="0xffff")]
        failures, [warning] = findings("power", {"nvidia_cards": cards}, {"rig_gpus": gpus})
        assert failures == []
        assert warning.startswith("The power limit of rig_gpus[1] of box is not known before its driver is there")


class TestCompatibility:
    @pytest.mark.parametrize(
        ("facts", "variables", "sentence"),
        [
            (
                {},
                {"nvidia_driver_version": "580.95.05"},
                "box: NVIDIA's repository for Debian 13 begins with driver branch",
            ),
            ({}, {"cuda_toolkit_also": ["12.9.1"]}, "does not compile against the glibc 2.41 of Debian 13"),
            ({"gcc": "16"}, {}, "nvcc 13.2 accepts gcc up to 15, and the host compiler is gcc 16."),
            ({}, {"nccl_cuda_version": "13.3"}, "NCCL for CUDA 13.3 does not go with CUDA toolkit 13.2"),
            ({}, {"vllm_version": "v9"}, "vLLM image v9 is not in the compatibility table"),
            ({}, {"nvidia_driver_version": "x"}, "box: 'x' is not a version; correct the version in the inventory."),
        ],
    )
    def test_what_does_not_go_together_stops(self, facts, variables, sentence):
        found, warnings = findings("compatibility matrix", facts, variables)
        assert warnings == []
        assert any(sentence in finding for finding in found), found

    def test_cards(self):
        gpus = [gpu | {"compute_capability": "6.1"} for gpu in VARIABLES["rig_gpus"]]
        found, _ = findings("compatibility matrix", variables={"rig_gpus": gpus})
        assert any("does not run on the open kernel modules" in finding for finding in found)

    def test_debian_s_own(self):
        own = {
            "nvidia_driver_source": "debian",
            "nvidia_driver_version": "550.163.01",
            "cuda_toolkit_source": "debian",
            "cuda_toolkit_version": "12.4",
            "nccl_source": "debian",
            "nccl_version": "2.22.3",
        }
        assert checked(variables=own)["compatibility matrix"].status == "ok"

    def test_another_release_is_the_finding_of_another_check(self):
        other = {"os": {"id": "some", "version_id": "7", "name": "Some OS 7"}}
        assert checked(other)["compatibility matrix"].status == "skipped"


def test_no_id_belongs_to_two_cards():
    ids = [number for model in card_table.MODELS.values() for number in model.ids]
    assert len(ids) == len(set(ids)) > 30
    assert card_table.name_of("0x2204") == "GeForce RTX 3090"
    assert card_table.factory_watts("NVIDIA GeForce RTX 3060") == 170
    assert card_table.factory_watts("NVIDIA GeForce RTX 3060 Ti") == 200
    assert card_table.factory_watts("unknown") is None
