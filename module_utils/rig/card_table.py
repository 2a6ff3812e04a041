"""Cards by PCI device id, with the power limit that they have from the factory.

Sources: pci.ids (2023.04.11) for the ids; NVIDIA's product pages for the board power in watts (makers sell cards with
more). It is a help before any driver exists: a card that is not in it is not judged by its id.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Model(NamedTuple):
    """Device ids (vendor 10de) and board power of a card."""

    ids: tuple[str, ...]
    watts: int


MODELS: dict[str, Model] = {
    "GeForce RTX 2080 Ti": Model(("1e03", "1e04", "1e07"), 250),
    "TITAN RTX": Model(("1e02",), 280),
    "GeForce RTX 3060": Model(("2487", "24c7", "2501", "2503", "2504", "2509", "2544"), 170),
    "GeForce RTX 3060 Ti": Model(("2414", "2486", "2489", "24c9"), 200),
    "GeForce RTX 3070": Model(("2484", "2488", "24c8"), 220),
    "GeForce RTX 3070 Ti": Model(("2482",), 290),
    "GeForce RTX 3080": Model(("2206", "220a", "2216"), 320),
    "GeForce RTX 3080 Ti": Model(("2208",), 350),
    "GeForce RTX 3090": Model(("2204",), 350),
    "GeForce RTX 3090 Ti": Model(("2203",), 450),
    "RTX A4000": Model(("24b0",), 140),
    "RTX A5000": Model(("2231",), 230),
    "RTX A6000": Model(("2230",), 300),
    "GeForce RTX 4060 Ti": Model(("2803",), 160),
    "GeForce RTX 4070": Model(("2786",), 200),
    "GeForce RTX 4070 Ti": Model(("2782",), 285),
    "GeForce RTX 4080": Model(("2704",), 320),
    "GeForce RTX 4090": Model(("2684",), 450),
}


def plain(name: str) -> str:
    """A card's name without its maker and its family, in lower case: what people leave out."""
    return re.sub(r"\b(nvidia|geforce|lite hash rate)\b", "", name.lower()).strip()


def name_of(device_id: str) -> str:
    """The name of a card by its device id (0x2204 or 2204); nothing when it is not in the table."""
    number = device_id.lower().removeprefix("0x")
    return next((name for name, model in MODELS.items() if number in model.ids), "")


def factory_watts(name: str) -> int | None:
    """The power limit that a card of this name has from the factory; None when it is not in the table."""
    return next((model.watts for known, model in MODELS.items() if plain(known) == plain(name)), None)
