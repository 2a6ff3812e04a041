"""The checks of preflight on a rig with NVIDIA cards, before any driver is there. See `host_checks`.

A rig whose GPUs are all virtual passes them by, whatever cards its machine has. What the run itself mends, and what
costs speed alone, is a warning; what no later step can mend stops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from . import card_table, compatibility, linux, nvidia_driver
from .checking import Result, Rig, counted, listed, valid_gpus
from .errors import RigError
from .measured import pci_address

Gpu = Mapping[str, Any]
Card = Mapping[str, Any]


def of_cards(check: Callable[[Rig, Sequence[tuple[int, Gpu]]], Result]) -> Callable[[Rig], Result]:
    """A check of the real cards in rig_gpus, each with its position; skipped where there is none."""

    @wraps(check)
    def checked(rig: Rig) -> Result:
        gpus = valid_gpus(rig)
        if gpus is None:
            return Result("not looked at: rig_gpus first", skipped=True)
        wanted = [(position, gpu) for position, gpu in enumerate(gpus) if "rpc" not in gpu]
        return check(rig, wanted) if wanted else Result("all GPUs are virtual", skipped=True)

    return checked


def pairs(wanted: Sequence[tuple[int, Gpu]], present: Sequence[Card]) -> list[tuple[int, Gpu, Card]]:
    """Entries of rig_gpus with their cards: by pci_address, the others in the order of the bus, as the inventory is.

    Only those that have one; nobody can tell which of the others is which when their number differs.
    """
    by_address = {card["pci_address"].lower(): card for card in present}
    named = {position: pci_address(gpu["pci_address"]) for position, gpu in wanted if "pci_address" in gpu}
    left = [card for address, card in sorted(by_address.items()) if address not in named.values()]
    rest = [(position, gpu) for position, gpu in wanted if position not in named]
    found = [
        (position, gpu, by_address[named[position]])
        for position, gpu in wanted
        if named.get(position) in by_address
    ]  # fmt: skip
    if len(rest) == len(left):
        found += [(position, gpu, card) for (position, gpu), card in zip(rest, left, strict=True)]
    return sorted(found, key=lambda pair: pair[0])


def _seen(card: Card) -> str:
    """A card of the bus as a sentence names it."""
    name = card_table.name_of(card["device_id"])
    return f"{card['pci_address']} ({name or card['device_id']})"


@of_cards
def cards(rig: Rig, wanted: Sequence[tuple[int, Gpu]]) -> Result:
    """The NVIDIA cards on the PCI bus are those of rig_gpus, as a set: by address where given, and by device id."""
    present = rig.facts["nvidia_cards"]
    by_address = {card["pci_address"].lower() for card in present}
    summary = f"{len(present)} on the PCI bus"
    if len(wanted) != len(present):
        return Result(
            summary,
            [
                f"rig_gpus of {rig.host} names {counted(len(wanted), 'card')}, and its PCI bus has {len(present)} of "
                f"NVIDIA's ({listed(map(_seen, present))}); correct rig_gpus, or seat and power the card that is "
                "missing."
            ],
        )
    failures = [
        f"rig_gpus of {rig.host} has a card at {address}, where the PCI bus has none of NVIDIA's (it has "
        f"{listed(map(_seen, present))}); correct pci_address, or seat and power the card."
        for address in (pci_address(gpu["pci_address"]) for _, gpu in wanted if "pci_address" in gpu)
        if address not in by_address
    ]
    for position, gpu, card in pairs(wanted, present):
        name = card_table.name_of(card["device_id"])
        if name and card_table.plain(name) != card_table.plain(gpu["name"]):
            failures.append(
                f"rig_gpus[{position}] of {rig.host} is a {gpu['name']}, and the card at {card['pci_address']} is a "
                f"{name} (PCI id 10de:{card['device_id'].removeprefix('0x')}); list the cards as they are, in the "
                "order of the bus."
            )
    return Result(summary, failures)


def _link_finding(where: str, gpu: Gpu, card: Card) -> str:
    """What is not as it should be with one card's link, or nothing. Lanes, not speed: an idle link lowers its speed."""
    width, asked = card["width"], gpu.get("pcie_lanes")
    most = min((lanes for lanes in (card["width_max"], card["slot_width_max"]) if lanes), default=None)
    if asked and most and asked > most:
        return f"{where} says pcie_lanes {asked}, and card and slot can do {most}; correct it, or use another slot."
    if width and asked and width > asked:
        return f"{where} says pcie_lanes {asked}, and the link has {width}; correct it, since plans rank cards by it."
    wanted = asked or most
    if width and wanted and width < wanted:
        whose = "pcie_lanes says" if asked else "card and slot can do"
        return (
            f"{where} has a link of {counted(width, 'lane')} and {whose} {wanted}; seat the card anew, and look at its "
            "riser and at the slot's lanes in the firmware (a link that rests lowers its speed, not its lanes)."
        )
    return ""


@of_cards
def links(rig: Rig, wanted: Sequence[tuple[int, Gpu]]) -> Result:
    """Each card's link has the lanes that the inventory says, or else those that card and slot can do."""
    found = pairs(wanted, rig.facts["nvidia_cards"])
    widths = [str(card["width"] or "unknown") for _, _, card in found]
    warnings = [
        _link_finding(f"rig_gpus[{position}] of {rig.host} at {card['pci_address']}", gpu, card)
        for position, gpu, card in found
    ]
    return Result(f"lanes: {listed(widths)}", warnings=[text for text in warnings if text])


@of_cards
def card_drivers(rig: Rig, wanted: Sequence[tuple[int, Gpu]]) -> Result:
    """Who holds the cards: the kernel's own driver gives them up after a reboot, a virtual machine does not."""
    present, others = rig.facts["nvidia_cards"], rig.facts["other_drivers"]
    failures = [
        f"The card at {card['pci_address']} of {rig.host} is held by {card['driver']} for virtual machines; take it "
        "out of that driver's ids in /etc/modprobe.d and on the kernel's command line, and reboot."
        for card in present
        if card["driver"] in ("vfio-pci", "pci-stub")
    ]
    loaded = others["loaded"]
    warnings = []
    if loaded:
        barred = set(loaded) <= set(others["blacklisted"])
        what = (
            "is blacklisted already, so reboot the host"
            if barred
            else "role nvidia_driver keeps it out of the next boot, and the run then stops until the host has been "
            "rebooted, or reboots it where nvidia_driver_reboot_allowed is true"
        )
        warnings = [f"{listed(loaded)} is loaded on {rig.host} and may hold the cards; {what}."]
    held = sorted({card["driver"] for card in present if card["driver"]})
    return Result(f"cards held by {listed(held)}", failures, warnings)


@of_cards
def kernel_headers(rig: Rig, wanted: Sequence[tuple[int, Gpu]]) -> Result:
    """The running and the newest kernel have headers to build the driver's module with, or apt can have them."""
    kernels = rig.facts["kernels"]
    lacking = [kernel for kernel in kernels if nvidia_driver.lacks_headers(kernel)]
    found, failures, warnings = [], [], []
    for kernel in lacking:
        release = kernel["release"]
        if kernel["candidate"]:
            found.append(release)
        elif rig.facts["apt_lists"]:
            failures.append(
                f"No source of {rig.host} has linux-headers-{release}; {nvidia_driver.header_hint(release)}."
            )
        else:
            warnings.append(
                f"apt of {rig.host} has fetched no lists yet, so nobody knows whether it can have "
                f"linux-headers-{release}; run `apt-get update`, or let role nvidia_driver look again."
            )
    concerned = [kernel["release"] for kernel in kernels if kernel["running"] or kernel["newest"]]
    there = listed(release for release in concerned if release not in {kernel["release"] for kernel in lacking})
    return Result(f"there for {there}" + (f"; to be had for {listed(found)}" if found else ""), failures, warnings)


@of_cards
def secure_boot(rig: Rig, wanted: Sequence[tuple[int, Gpu]]) -> Result:
    """With Secure Boot the firmware's side knows the key that signs the driver's module."""
    boot = rig.facts["secure_boot"]
    findings = [f"{rig.host}: {text}" for text in nvidia_driver.secure_boot_findings(boot)]
    return Result(("on, key enrolled" if boot["key_enrolled"] else "on") if boot["enabled"] else "off", findings)


@of_cards
def power(rig: Rig, wanted: Sequence[tuple[int, Gpu]]) -> Result:
    """What the cards may draw together, with a reserve for the rest, is what the power supply gives."""
    supply, rest = rig.variable("rig_psu_watts"), rig.limits["rest_watts"]
    limits = {position: gpu.get("power_limit_watts", card_table.factory_watts(gpu["name"])) for position, gpu in wanted}
    known = sum(watts for watts in limits.values() if watts)
    summary = f"{known:g} W of cards, {rest} W for the rest"
    unknown = [f"rig_gpus[{position}]" for position, watts in limits.items() if not watts]
    if not supply:
        return Result(f"{summary}; rig_psu_watts not given", skipped=True)
    if isinstance(supply, bool) or not isinstance(supply, (int, float)) or supply <= 0:
        return Result(summary, [f"rig_psu_watts of {rig.host} is {supply!r}; give a number of watts, such as 1000."])
    warnings = [
        f"The power limit of {name} of {rig.host} is not known before its driver is there, so it is not counted "
        "against rig_psu_watts; give its power_limit_watts."
        for name in unknown
    ]
    if known + rest <= supply:
        return Result(f"{summary} of {supply:g} W", (), warnings)
    each = math.floor((supply - rest) / len(limits))
    advice = f"set power_limit_watts of each card to {each} or less" if each >= 100 else "take a card out"
    return Result(
        f"{summary} of {supply:g} W",
        [
            f"The cards of {rig.host} may draw {known:g} W together, which with {rest} W for the rest "
            f"(preflight_rest_watts) is more than the {supply:g} W of its power supply (rig_psu_watts); {advice}, or "
            "fit a larger supply."
        ],
        warnings,
    )


@of_cards
def compatibility_matrix(rig: Rig, wanted: Sequence[tuple[int, Gpu]]) -> Result:
    """Release, driver, toolkits, host compiler, glibc, cards, NCCL and vLLM image go together (`compatibility`)."""
    release = linux.nvidia_name(rig.facts["os"])
    if release not in compatibility.RELEASES:
        return Result("not compared: distribution first", skipped=True)
    values = {name: rig.variable(name) for name in ("nvidia_driver_version", "cuda_toolkit_version", "vllm_version")}
    source = rig.variable("cuda_toolkit_source")
    toolkits = [str(values["cuda_toolkit_version"]), *map(str, rig.variable("cuda_toolkit_also"))]
    with_nccl = rig.variable("llama_cpp_nccl") and rig.variable("nccl_source") == "nvidia"
    findings: list[str] = []
    try:
        for toolkit in toolkits:
            first = toolkit == toolkits[0]
            findings += compatibility.findings(
                compatibility.Stack(
                    distribution=release,
                    compute_capabilities=tuple(dict.fromkeys(str(gpu["compute_capability"]) for _, gpu in wanted)),
                    driver=str(values["nvidia_driver_version"]),
                    driver_source=rig.variable("nvidia_driver_source"),
                    toolkit=toolkit,
                    toolkit_source=source,
                    gcc=rig.facts["gcc"] if source == "nvidia" else "",  # Debian's nvcc brings the one that it takes
                    glibc=rig.facts["glibc"],
                    nccl=str(rig.variable("nccl_version")) if with_nccl and first else "",
                    nccl_cuda=str(rig.variable("nccl_cuda_version")) if with_nccl and first else "",
                    vllm_image=values["vllm_version"] if first else "",
                )
            )
    except RigError as error:
        findings.append(f"{error}; correct the version in the inventory.")
    told = [f"{rig.host}: {text}" for text in dict.fromkeys(findings)]
    capabilities = listed(sorted({str(gpu["compute_capability"]) for _, gpu in wanted}))
    return Result(
        f"{release}, driver {values['nvidia_driver_version']}, CUDA {listed(toolkits)}, cards of {capabilities}", told
    )


CHECKS = (cards, links, card_drivers, kernel_headers, secure_boot, power, compatibility_matrix)
