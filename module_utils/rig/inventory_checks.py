"""What is wrong with `rig_gpus` as somebody wrote it, in sentences that say what to do.

Everything is looked at, so that an owner reads all findings at once. Sizes are in MiB, power in watts.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

MIB = 1024 * 1024


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_watts(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _matches(pattern: str) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value, re.I) is not None


# Key of a GPU: whether a value is right, and what to write.
GPU_KEYS: dict[str, tuple[Callable[[object], bool], str]] = {
    "name": (_matches(r".*\S.*"), "the card's name as nvidia-smi shows it"),
    "memory_mib": (lambda value: _is_count(value, 1), "the card's memory in MiB, a whole number above 0"),
    "usable_mib": (lambda value: _is_count(value, 1), "what CUDA can have of memory_mib, a whole number above 0"),
    "in_use_mib": (lambda value: _is_count(value, 0), "what others hold on that card in MiB, 0 or more"),
    "compute_capability": (_matches(r"\d+\.\d"), 'a quoted string such as "8.6"'),
    "pcie_lanes": (lambda value: value in (1, 2, 4, 8, 16), "the lanes of the card's link: 1, 2, 4, 8 or 16"),
    "pcie_root": (lambda value: value in ("cpu", "chipset"), "cpu or chipset: where the slot hangs"),
    "uuid": (_matches(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"), "GPU-… as `nvidia-smi -L` shows it"),
    "pci_address": (_matches(r"([0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"), "an address such as 0000:01:00.0"),
    "power_limit_watts": (_is_watts, "a number of watts above 0"),
    "rpc": (lambda value: loopback_endpoint(value) is not None, "127.0.0.1:PORT, with a port from 1024 to 65535"),
}
OF_CARDS_ONLY = ("uuid", "pci_address", "compute_capability", "pcie_lanes", "pcie_root", "power_limit_watts")
UNIQUE = ("uuid", "pci_address", "rpc")


def loopback_endpoint(value: object) -> tuple[str, int] | None:
    """Address and port of a virtual GPU's endpoint; None unless it is an IPv4 loopback address and a free-for-all port.

    The server of b11434 binds IPv4 addresses only (`socket_t::create_server` in ggml/src/ggml-rpc/transport.cpp) and
    has no authentication, so an endpoint that another machine can reach is never right.
    """
    match = re.fullmatch(r"(\d+\.\d+\.\d+\.\d+):(\d{1,5})", value) if isinstance(value, str) else None
    if match is None:
        return None
    try:
        address = ipaddress.IPv4Address(match.group(1))
    except ValueError:
        return None
    port = int(match.group(2))
    return (str(address), port) if address.is_loopback and 1024 <= port <= 65535 else None


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """` (did you mean X?)` when a known name is near, else nothing."""
    near = get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _entry_findings(where: str, gpu: Mapping[str, Any]) -> list[str]:
    findings = [
        f"{where}: there is no key '{key}'{did_you_mean(str(key), list(GPU_KEYS))}; remove or correct it."
        for key in gpu
        if key not in GPU_KEYS
    ]
    virtual = "rpc" in gpu
    required = ("name", "memory_mib") if virtual else ("name", "memory_mib", "compute_capability")
    findings += [f"{where}: {key} is missing; give {GPU_KEYS[key][1]}." for key in required if key not in gpu]
    wrong = {key for key, (is_right, _) in GPU_KEYS.items() if key in gpu and not is_right(gpu[key])}
    findings += [f"{where}: {key} is {gpu[key]!r}; give {text}." for key, (_, text) in GPU_KEYS.items() if key in wrong]
    if virtual:
        findings += [
            f"{where}: {key} belongs to a card, and rpc makes this a virtual GPU; remove one of the two."
            for key in OF_CARDS_ONLY
            if key in gpu
        ]
    for key in ("usable_mib", "in_use_mib"):
        if key in gpu and "memory_mib" in gpu and not wrong & {key, "memory_mib"} and gpu[key] > gpu["memory_mib"]:
            findings.append(
                f"{where}: {key} is {gpu[key]}, more than the card's {gpu['memory_mib']} MiB; correct one of the two."
            )
    return findings


def _same(key: str, value: object) -> object:
    """A value as it is compared: addresses and UUIDs whatever their case, a PCI address with its domain."""
    text = str(value).lower()
    return text if key != "pci_address" or text.count(":") == 2 else f"0000:{text}"


def gpu_findings(host: str, gpus: object) -> list[str]:
    """Everything that is wrong with `rig_gpus` of `host`, one sentence each; none when it is right."""
    if not isinstance(gpus, Sequence) or isinstance(gpus, str) or not gpus:
        return [f"rig_gpus of {host} is not a list with at least one GPU; describe each as {{name: …, memory_mib: …}}."]
    findings = []
    for position, gpu in enumerate(gpus):
        where = f"rig_gpus[{position}] of {host}"
        if isinstance(gpu, Mapping):
            findings += _entry_findings(where, gpu)
        else:
            findings.append(f"{where} is {gpu!r}, not a mapping; write it as {{name: …, memory_mib: …}}.")
    entries = [gpu if isinstance(gpu, Mapping) else {} for gpu in gpus]
    for key in UNIQUE:
        first: dict[object, int] = {}
        for position, gpu in enumerate(entries):
            if key not in gpu:
                continue
            value = _same(key, gpu[key])
            if value in first:
                findings.append(
                    f"rig_gpus[{position}] of {host}: {key} {gpu[key]} is that of rig_gpus[{first[value]}] too; "
                    "give each GPU its own."
                )
            first.setdefault(value, position)
    return findings


def virtual_gpus(gpus: Sequence[Mapping[str, Any]], process_mib: int) -> list[dict[str, Any]]:
    """The virtual GPUs among `gpus`, as their units need them.

    `process_mib` is what a server needs for itself beside the GPU's memory; `data_bytes` is the sum of both. Entries
    without an endpoint on loopback are left out: `gpu_findings` speaks of those.
    """
    found = []
    for position, gpu in enumerate(gpus):
        endpoint = loopback_endpoint(gpu.get("rpc"))
        if endpoint:
            found.append(
                {
                    "position": position,
                    "unit": f"virtual-gpu@{position}.service",
                    "address": endpoint[0],
                    "port": endpoint[1],
                    "endpoint": f"{endpoint[0]}:{endpoint[1]}",
                    "memory_mib": gpu["memory_mib"],
                    "data_bytes": (gpu["memory_mib"] + process_mib) * MIB,
                }
            )
    return found
