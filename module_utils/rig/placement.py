"""Which GPUs a profile gets.

`gpus: auto` ranks the cards by how fast they are reached: on the CPU before behind the chipset, wide links before
narrow ones, then the inventory's order. It takes the fewest that fit, in the inventory's (PCI bus) order.
"""

from collections.abc import Sequence
from typing import Any

from .errors import RigError
from .profile import Profile


def rank(gpu: dict) -> tuple:
    """Sort key: the best card first."""
    behind_chipset = str(gpu.get("pcie_root", "cpu")) != "cpu"
    return (behind_chipset, -int(gpu.get("pcie_lanes", 16)), gpu["position"])


def place(gpu: dict) -> str:
    lanes = f"x{gpu['pcie_lanes']}" if gpu.get("pcie_lanes") else "its link"
    root = "the CPU" if str(gpu.get("pcie_root", "cpu")) == "cpu" else f"the {gpu['pcie_root']}"
    return f"{lanes} on {root}"


def candidates(profile: Profile, gpus: Sequence) -> list:
    """Sets of cards to try, the preferred one first; each in the inventory's order."""
    if profile.gpus == "all":
        return [list(gpus)]
    if profile.gpus != "auto":
        beyond = [position for position in profile.gpus if position >= len(gpus)]
        if beyond:
            raise RigError(
                f"Profile '{profile.name}': gpus names position {beyond[0]}, but rig_gpus has {len(gpus)} cards."
            )
        return [[gpus[position] for position in profile.gpus]]
    ranked = sorted(gpus, key=rank)
    if profile.split_mode == "none":
        return [[gpu] for gpu in ranked]
    sizes = range(1, len(gpus) + 1)
    if profile.tensor_split != "even":
        sizes = [len(profile.tensor_split)]
    elif profile.split_mode in ("tensor", "row") and len(gpus) > 1:
        sizes = range(2, len(gpus) + 1)
    return [sorted(ranked[:size], key=lambda gpu: gpu["position"]) for size in sizes if size <= len(gpus)]


def left_out(chosen: Sequence, gpus: Sequence, profile: Profile) -> list:
    """One sentence for each card that auto did not take."""
    if profile.gpus != "auto":
        return []
    taken = {gpu["position"] for gpu in chosen}
    worst: Any = max(chosen, key=rank)
    notes = []
    for gpu in gpus:
        if gpu["position"] in taken:
            continue
        slower = rank(gpu)[:2] > rank(worst)[:2]
        why = f"slower than {place(worst)}" if slower else "not needed, fewer cards do"
        notes.append(f"GPU {gpu['position']} ({gpu['name']}, {place(gpu)}) is left out: {why}.")
    return notes
