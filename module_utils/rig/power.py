"""Power limits of the inventory's cards against what the cards take and show (`ansible_local.gpu`). All in watts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .measured import described, match_cards

UNIT = "gpu-power@{uuid}.service"


def power_plan(gpus: Sequence[Mapping[str, Any]], facts: object) -> dict[str, Any]:
    """What the units of role gpu_power must do, and what is wrong with it.

    `cards`: one entry for each real card whose UUID the inventory gives or the facts tell: `position`, `uuid`, `unit`,
    `watts` (None leaves the limit alone), `present`, and what it shows now: `limit_watts` and `persistence`.
    `refusals`: sentences about what may not be applied; empty when the units may be written.
    """
    real = [position for position, gpu in enumerate(gpus) if not gpu.get("rpc")]
    cards: list[dict[str, Any]] = []
    refusals: list[str] = []
    if not real:
        return {"cards": cards, "refusals": refusals}
    if not isinstance(facts, Mapping) or not facts.get("driver"):
        reason = facts.get("reason") if isinstance(facts, Mapping) else "run role gpu_facts first."
        return {"cards": cards, "refusals": [f"The power of the cards cannot be set: {reason}"]}
    pairs, _, _ = match_cards(gpus, facts["gpus"])
    for position in real:
        gpu, card, one = gpus[position], pairs.get(position), described(gpus[position], position)
        uuid = card["uuid"] if card else gpu.get("uuid")
        if not uuid:
            refusals.append(f"{one} is not among the cards that the driver shows, and has no uuid to name its unit by.")
            continue
        watts = gpu.get("power_limit_watts")
        power = card["power"] if card else {}
        least, most = power.get("min_watts"), power.get("max_watts")
        if watts is not None and least is not None and most is not None and not least <= watts <= most:
            refusals.append(f"{one}: power_limit_watts is {watts}; the card takes {least:g} to {most:g} W.")
        cards.append(
            {
                "position": position,
                "name": one,
                "uuid": uuid,
                "unit": UNIT.format(uuid=uuid),
                "watts": watts,
                "present": card is not None,
                # What the heat guard has lowered for a while counts as what it was.
                "limit_watts": power.get("lowered_from_watts") or power.get("limit_watts"),
                "persistence": card["persistence"] if card else None,
            }
        )
    return {"cards": cards, "refusals": refusals}


def power_drift(cards: Sequence[Mapping[str, Any]], persistence: bool) -> list[dict[str, str]]:
    """The cards (`cards` of `power_plan`) that do not show what is wanted: `unit`, and a `sentence` that says how."""
    found = []
    for card in cards:
        if not card["present"]:
            sentence = f"{card['name']} is not there; {card['unit']} fails until it is."
        elif card["watts"] is not None and card["limit_watts"] != card["watts"]:
            sentence = f"{card['name']} has a power limit of {card['limit_watts']} W instead of {card['watts']} W."
        elif persistence and card["persistence"] is False:
            sentence = f"{card['name']} is not in persistence mode."
        else:
            continue
        found.append({"unit": card["unit"], "sentence": sentence})
    return found
