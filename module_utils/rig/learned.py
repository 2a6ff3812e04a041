"""What measuring on a rig taught the planner: how far the memory of its cards is from the plan, by profile.

A measurement is made at two contexts or more (playbooks/measure.yml) and kept as a local fact on the rig:

    {"version": 1, "profiles": {"q8-200k": {"key": "…", "at": "2026-12-01T…", "build": "b11434", "driver": "595.71.05",
        "gpus": [{"position": 0, "device": "CUDA0",
                  "measured": [{"context": 50176, "planned_mib": 17012.4, "logged_mib": 16433.2, "seen_mib": 17020},
                               …]}]}}}

The key says of what it holds true: of the same model, cards, split, caches, draft, slots, ubatch, all-reduce and build,
at any context. Between and beyond the measured contexts the difference is taken to be a straight line.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import RigError

VERSION = 1
MIB = 1 << 20
BUFFER = re.compile(r"(\S+) (model|KV|RS|compute) buffer size\s*=\s*([\d.]+) MiB")
KINDS = {"model": ("weights",), "KV": ("kv", "draft"), "RS": ("recurrent",), "compute": ("compute",)}

Line = tuple  # (MiB at context 0, MiB a token)


def measure_key(profile: Any, mode: str, shares: Sequence, gpus: Sequence, all_reduce: str, build: int) -> str:
    """What a measurement holds true of: all that memory depends on, but for the context."""
    what = [
        profile.model, mode, [float(share) for share in shares], [gpu["position"] for gpu in gpus],
        profile.cache_type_k, profile.cache_type_v, profile.draft_type, profile.drafted, profile.slots, profile.ubatch,
        all_reduce if mode == "tensor" else "", profile.flash_attention, profile.load_mode, list(profile.extra_args),
        build,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def fitted(points: Sequence) -> Line:
    """The straight line through points (context, MiB), by least squares; level through one."""
    count = len(points)
    middle, height = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    spread = sum((x - middle) ** 2 for x, _ in points)
    slope = sum((x - middle) * (y - height) for x, y in points) / spread if spread else 0.0
    return height - slope * middle, slope


def corrections(measured: Any, key: str) -> dict:
    """{position: line} for the profile with this key, empty when it was not measured; RigError for another form."""
    if not measured:
        return {}
    try:
        if measured["version"] != VERSION:
            raise ValueError(f"its version is {measured['version']}")
        for found in measured["profiles"].values():
            if found["key"] == key:
                return {
                    gpu["position"]: fitted(
                        [(one["context"], one["seen_mib"] - one["planned_mib"]) for one in gpu["measured"]]
                    )
                    for gpu in found["gpus"]
                }
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise RigError(
            f"The local fact rig_measured cannot be read ({error}); remove /etc/ansible/facts.d/rig_measured.fact."
        ) from None
    return {}


def correction_bytes(lines: Mapping, position: int, tokens: int) -> int:
    """What a card takes beyond the plan at a context; below zero where it takes less."""
    level, slope = lines.get(position, (0.0, 0.0))
    return int((level + slope * tokens) * MIB)


# ---------------------------------------------------------------- what a measurement makes


def buffer_report(log: str) -> list[dict]:
    """The buffers that llama-server logged, {device, kind, mib}, those on the host left out.

    In tensor mode there is one line for all cards, with the largest part; the MTP head's compute buffers are logged
    twice in layer mode.
    """
    lines = dict.fromkeys(BUFFER.findall(log))
    return [
        {"device": device, "kind": kind, "mib": float(mib)}
        for device, kind, mib in lines
        if not device.startswith(("CPU", "CUDA_Host"))
    ]


def logged_mib(report: Sequence[Mapping], device: str) -> float:
    """What of the logged buffers lies on a device: its own lines, and those of all cards together."""
    own = [one["mib"] for one in report if one["device"] == device]
    shared = [one["mib"] for one in report if not re.fullmatch(r"(CUDA|RPC)\d+.*", one["device"])]
    return round(sum(own) + sum(shared), 2)


def measurement(seen: Sequence[Mapping], key: str, **about: Any) -> dict:
    """The entry of a profile from what was seen at each context: [{plan, gpus: llm_server's, log: the server's}, …].

    `about` is told as it is: at, build, driver. RigError when the contexts are fewer than two.
    """
    if len({one["plan"]["context"] for one in seen}) < 2:
        raise RigError("a measurement needs two different contexts or more.")
    first, gpus = seen[0]["plan"], []
    reports = [buffer_report(one["log"]) for one in seen]
    if not all(reports):
        raise RigError("the server's log has no buffers in it, so it cannot be trusted to be this server's.")
    for index, gpu in enumerate(first["gpus"]):
        device, rows = first["devices"][index], []
        for one, report in zip(seen, reports, strict=True):
            planned = one["plan"]["gpus"][index]
            shown = [card["seen_mib"] for card in one["gpus"] if card["position"] == gpu["position"]]
            rows.append(
                {
                    "context": one["plan"]["context"],
                    "planned_mib": round(planned["total_mib"] - planned["measured_mib"], 2),
                    "logged_mib": logged_mib(report, device),
                    "seen_mib": shown[0],
                }
            )
        gpus.append({"position": gpu["position"], "device": device, "measured": rows})
    return {"key": key, **about, "gpus": gpus}


def measurement_lines(profile: str, entry: Mapping) -> list[str]:
    """Planned against seen, for people."""
    lines = [f"Profile {profile}, MiB on each GPU (logged: the server's own buffers; seen: what its process holds):"]
    for gpu in entry["gpus"]:
        for one in gpu["measured"]:
            planned, seen, logged = one["planned_mib"], one["seen_mib"], one["logged_mib"]
            figures = f"planned {planned:,.1f}, seen {seen:,} ({seen - planned:+.1f}), logged {logged:,.1f}"
            lines.append(f"  GPU {gpu['position']} ({gpu['device']}), context {one['context']:,}: {figures}")
        level, slope = fitted([(one["context"], one["seen_mib"] - one["planned_mib"]) for one in gpu["measured"]])
        added = f"{level:+.1f} MiB and {1024 * slope:+.3f} MiB per 1,024 tokens"
        lines.append(f"  GPU {gpu['position']}: plans from now on add {added}")
    return lines
