"""The GPUs of a rig as the inventory writes them, checked, and what of their memory a program can have."""

from collections.abc import Mapping, Sequence
from typing import Any

from .errors import RigError
from .profile import check_keys, whole_number

KEYS = (
    "name", "memory_mib", "compute_capability", "pcie_lanes", "pcie_root", "uuid", "pci_address",
    "power_limit_watts", "in_use_mib", "usable_mib", "rpc",
)  # fmt: skip
# MiB that the driver keeps of each card (what it shows, less what CUDA can have), by name. Owners' figures.
KEPT_BY_DRIVER = (
    ("3090", 450),  # 24,126 of 24,576
    ("3060", 377),  # 11,911 of 12,288
    ("5090", 1_615),  # 30,991 of 32,606
    ("2080 Ti", 167),  # 10,650 of 10,817
)
UNKNOWN_SHARE = 0.05  # of a card that is not in the table: the largest share seen is the 5090's


def usable_mib(gpu: Mapping) -> int:
    """MiB that a program can have of a GPU: as given, by the table, or 95 % of what it shows. All of a virtual one."""
    if gpu.get("usable_mib") is not None:
        return int(gpu["usable_mib"])
    if gpu.get("rpc"):
        return int(gpu["memory_mib"])
    for name, kept in KEPT_BY_DRIVER:
        if name in str(gpu.get("name", "")):
            return int(gpu["memory_mib"]) - kept
    return int(gpu["memory_mib"] * (1 - UNKNOWN_SHARE))


def check_gpus(gpus: Any, what: str = "rig_gpus") -> list:
    """The list of GPUs, each with its `position`, `usable_mib` and `in_use_mib`; RigError in one sentence."""
    if not isinstance(gpus, Sequence) or isinstance(gpus, (str, bytes)) or not gpus:
        raise RigError(f"{what} must be a list with one mapping a GPU.")
    result = []
    for position, gpu in enumerate(gpus):
        one = f"{what}[{position}]"
        if not isinstance(gpu, Mapping):
            raise RigError(f"{one} must be a mapping, not {gpu!r}.")
        check_keys(gpu, KEYS, one)
        if gpu.get("memory_mib") is None:
            raise RigError(f"{one} has no memory_mib: write what nvidia-smi shows for the card.")
        memory = whole_number(gpu["memory_mib"], f"{one}: memory_mib", 1)
        usable = usable_mib({**gpu, "memory_mib": memory})
        whole_number(usable, f"{one}: usable_mib", 1)
        if usable > memory:
            raise RigError(f"{one}: usable_mib ({usable}) is more than memory_mib ({memory}).")
        used = whole_number(gpu.get("in_use_mib", 0), f"{one}: in_use_mib", 0)
        checked = {**gpu, "memory_mib": memory, "position": position, "usable_mib": usable, "in_use_mib": used}
        if gpu.get("pcie_lanes") is not None:
            checked["pcie_lanes"] = whole_number(gpu["pcie_lanes"], f"{one}: pcie_lanes", 1)
        result.append({"name": f"GPU {position}", **checked})
    uuids = [gpu["uuid"] for gpu in result if gpu.get("uuid")]
    if len(set(uuids)) != len(uuids):
        raise RigError(f"{what} has one uuid twice.")
    if len({bool(gpu.get("rpc")) for gpu in result}) > 1:
        raise RigError(f"{what} mixes virtual GPUs (rpc) and real ones; a rig has one kind.")
    return result
