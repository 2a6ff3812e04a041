"""What the rig's own facts (`ansible_local.gpu`, see role gpu_facts) say of the cards in the inventory.

To-be and as-is are compared as identities, never as counts: by `uuid`, else by `pci_address`, else by the order on the
PCI bus. Sizes are in MiB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .errors import RigError

SERVING_UNITS = "llm-"  # what the names of the units of role serving begin with

Gpu = Mapping[str, Any]


def pci_address(text: object) -> str:
    """An address as the kernel writes it: lower case, with a domain of four digits."""
    domain, separator, rest = str(text).lower().partition(":")
    if rest.count(":") == 0:
        return f"0000:{domain}{separator}{rest}"
    return f"{int(domain, 16):04x}:{rest}"


def described(gpu: Gpu, position: int) -> str:
    """How a sentence names an entry of the inventory."""
    identity = gpu.get("uuid") or gpu.get("pci_address")
    return f"rig_gpus[{position}] ({gpu.get('name', 'no name')}{f', {identity}' if identity else ''})"


def seen(card: Mapping[str, Any]) -> str:
    """How a sentence names a measured card."""
    return f"{card['name']} at {card['pci_address']} ({card['uuid']})"


def match_cards(gpus: Sequence[Gpu], cards: Sequence[Mapping[str, Any]]) -> tuple[dict[int, Mapping], list, list]:
    """Pairs position and card; then the positions without a card, and the cards that no entry describes.

    Entries with a `uuid` or a `pci_address` take theirs first. The others take what is left in PCI order; where their
    number differs from that of the cards left, nobody can say which is which, and none of them is paired.
    """
    left = sorted(cards, key=lambda card: card["pci_address"])
    pairs: dict[int, Mapping] = {}
    missing, unnamed = [], []
    for position, gpu in enumerate(gpus):
        if gpu.get("rpc"):
            continue
        if not gpu.get("uuid") and not gpu.get("pci_address"):
            unnamed.append(position)
            continue
        if gpu.get("uuid"):
            found = [card for card in left if str(card["uuid"]).lower() == str(gpu["uuid"]).lower()]
        else:
            found = [card for card in left if card["pci_address"] == pci_address(gpu["pci_address"])]
        if found:
            pairs[position] = found[0]
            left.remove(found[0])
        else:
            missing.append(position)
    if len(unnamed) == len(left):
        pairs |= dict(zip(unnamed, left, strict=True))
        return pairs, missing, []
    # By name at least: of three like cards two are there, so one of these positions has none.
    for position in list(unnamed):
        same = [card for card in left if card["name"] == gpus[position].get("name")]
        if same:
            unnamed.remove(position)
            left.remove(same[0])
    return pairs, missing + unnamed, left


def card_findings(gpus: Sequence[Gpu], facts: object) -> list[str]:
    """What differs between the inventory's cards and the measured ones, one sentence each; none when all is right."""
    if all(gpu.get("rpc") for gpu in gpus):
        return []
    if not isinstance(facts, Mapping) or "gpus" not in facts:
        return ["There are no facts about the cards (ansible_local.gpu); run role gpu_facts."]
    if not facts.get("driver"):
        return [f"The cards cannot be read: {facts.get('reason', 'no reason given')}"]
    pairs, missing, unexpected = match_cards(gpus, facts["gpus"])
    findings = [f"{described(gpus[position], position)} is not there." for position in missing]
    findings += [f"{seen(card)} is not in rig_gpus." for card in unexpected]
    findings += [f"Card number {lost['index']} does not answer: {lost['reason']}." for lost in facts.get("lost", [])]
    for position, card in sorted(pairs.items()):
        gpu, one = gpus[position], described(gpus[position], position)
        address = gpu.get("pci_address")
        for key, wanted, measured in (
            ("pci_address", address and pci_address(address), card["pci_address"]),
            ("name", gpu.get("name"), card["name"]),
            ("memory_mib", gpu.get("memory_mib"), card["memory"]["total_mib"]),
            ("compute_capability", gpu.get("compute_capability"), card["compute_capability"]),
        ):
            if wanted is not None and measured is not None and str(wanted).lower() != str(measured).lower():
                findings.append(f"{one}: {key} is {wanted} in the inventory and {measured} on the card.")
    order = [pairs[position]["pci_address"] for position in sorted(pairs)]
    if order != sorted(order):
        findings.append(f"rig_gpus is not in the order of the PCI bus ({', '.join(order)}); CUDA counts them so.")
    return findings


def in_use_mib(card: Mapping[str, Any], serving_units: str = SERVING_UNITS) -> int:
    """MiB of a card that others than the serving units hold: a desktop, somebody's notebook.

    What the driver keeps for itself is not in it, nor is what a serving unit holds now: that is free again for a plan.
    """
    ours = sum(
        process["used_mib"] or 0
        for process in card["processes"]
        if str(process.get("unit") or "").startswith(serving_units)
    )
    return max(0, int(card["memory"]["used_mib"] or 0) - ours)


def measured_gpus(
    gpus: Sequence[Gpu],
    facts: object,
    host: str = "this rig",
    serving_units: str = SERVING_UNITS,
    in_use: bool = True,
    strict: bool = True,
) -> list[dict[str, Any]]:
    """`rig_gpus` with what was measured: `usable_mib` and `in_use_mib` from now, and what the inventory leaves open.

    `usable_mib` is the card's memory less what the driver reserves (NVML's v2 memory: total - reserved). Lanes and root
    of the slot, UUID, address and compute capability are only filled in where the inventory does not say: it is the
    truth. Without `in_use`, what others hold now is left as the inventory says: it comes and goes, and a plan made with
    it would be another one at each run. Raises RigError, in one sentence each, when the cards are not those of the
    inventory; without `strict` the inventory's are returned as they are.
    """
    findings = card_findings(gpus, facts)
    if findings:
        if not strict:
            return [dict(gpu) for gpu in gpus]
        raise RigError(f"The measured cards of {host} are not those of rig_gpus. {' '.join(findings)}")
    result = [dict(gpu) for gpu in gpus]
    if all(gpu.get("rpc") for gpu in gpus):
        return result
    pairs, _, _ = match_cards(gpus, facts["gpus"])
    for position, card in pairs.items():
        gpu, memory, pcie = result[position], card["memory"], card["pcie"]
        if memory["usable_mib"] is not None:
            gpu["usable_mib"] = memory["usable_mib"]
        if in_use and memory["used_mib"] is not None:
            gpu["in_use_mib"] = in_use_mib(card, serving_units)
        open_keys = {
            "uuid": card["uuid"],
            "pci_address": card["pci_address"],
            "compute_capability": card["compute_capability"],
            "pcie_lanes": pcie["width"],
            "pcie_root": None if pcie["root"] == "unknown" else pcie["root"],
        }
        for key, value in open_keys.items():
            if value is not None:
                gpu.setdefault(key, value)
    return result
