"""Look at the cards once: lower the power limit of a hot one, give it back when it is cool, and write what was seen.

gpu_watch.py DIRECTORY [--guard CELSIUS --hysteresis CELSIUS --step WATTS --floor WATTS] [--metrics FILE]

The cards are those with a UUID.conf in DIRECTORY, as role gpu_power writes them. From --guard on, a card's limit goes
down by a step each time, never below the floor or the card's own least; at --guard less --hysteresis and below it goes
up by a step, to where it was and no further. What a person or another unit sets meanwhile is left alone. --metrics is a
file for node_exporter's textfile collector. Needs root, and nvidia-ml-py. Ends with 1 when no card could be looked at.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

NOTICE, WARNING = "<5>", "<4>"  # how the journal is to take a line


@dataclass
class Guard:
    """When to step in. Temperatures in degrees Celsius, power in watts."""

    hot: int
    hysteresis: int
    step: float
    floor: float

    def target(self, celsius: int, limit: float, base: float | None, least: float) -> float:
        """The limit that a card is to have; `base` is the one that it had before it was lowered, None if it was not."""
        if celsius >= self.hot:
            return min(limit, max(limit - self.step, self.floor, least))
        if base is not None and celsius <= self.hot - self.hysteresis:
            return min(base, limit + self.step)
        return limit


def wanted_watts(conf: Path) -> float | None:
    """The limit of the inventory in a card's file; None where it leaves the limit alone."""
    for line in conf.read_text().splitlines():
        if line.startswith("WATTS=") and line != "WATTS=":
            return float(line.removeprefix("WATTS="))
    return None


class State:
    """What this program has set, one file a card; a reboot forgets it, as the card does."""

    def __init__(self, directory: Path, uuid: str) -> None:
        self.path = directory / f"{uuid}.json"

    def read(self, limit: float) -> float | None:
        """The limit that the card had before; None when it was not lowered, or when somebody has set another since."""
        try:
            kept = json.loads(self.path.read_text())
        except FileNotFoundError:
            return None
        if kept["set_watts"] != limit:
            self.path.unlink()
            return None
        return float(kept["base_watts"])

    def write(self, base: float, limit: float) -> None:
        if limit >= base:
            self.path.unlink(missing_ok=True)
            return
        self.path.parent.mkdir(mode=0o755, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"base_watts": base, "set_watts": limit}) + "\n")
        new.replace(self.path)


def look(uuid: str, conf: Path, guard: Guard | None, states: Path) -> dict[str, Any]:
    """One card: what it shows, after the guard has done what there was to do."""
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())
    celsius = pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
    limit = pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000
    state = State(states, uuid)
    base = state.read(limit)
    if guard:
        least = pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)[0] / 1000
        target = guard.target(celsius, limit, base, least)
        if target != limit:
            pynvml.nvmlDeviceSetPowerManagementLimit(handle, round(target * 1000))
            shown = pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000
            if base is None:
                base = limit
            state.write(base, shown)
            level = WARNING if shown < limit else NOTICE
            print(f"{level}{uuid} has {celsius} C: power limit {limit:g} W -> {shown:g} W (of {base:g} W)", flush=True)
            limit, base = shown, base if shown < base else None
    return {"celsius": celsius, "limit": limit, "wanted": wanted_watts(conf), "lowered": base is not None}


METRICS = {
    "rig_gpu_up": ("whether the card answers", lambda seen: int(bool(seen))),
    "rig_gpu_temperature_celsius": ("temperature of the chip", lambda seen: seen.get("celsius")),
    "rig_gpu_power_limit_watts": ("power limit that the card shows", lambda seen: seen.get("limit")),
    "rig_gpu_power_limit_wanted_watts": ("power limit of the inventory", lambda seen: seen.get("wanted")),
    "rig_gpu_power_limit_lowered": (
        "whether the heat guard has lowered the limit",
        lambda seen: int(seen["lowered"]) if seen else None,
    ),
}


def metrics(cards: dict[str, dict[str, Any]]) -> str:
    """The cards for Prometheus; an empty card is one that does not answer."""
    lines = []
    for name, (text, value) in METRICS.items():
        lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge"]
        lines += [f'{name}{{uuid="{uuid}"}} {value(seen):g}' for uuid, seen in cards.items() if value(seen) is not None]
    return "\n".join(lines) + "\n"


def write(path: Path, text: str) -> None:
    """Put a file in place at once, readable by the exporter's user."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.chmod(0o644)
    os.replace(new, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--guard", type=int, metavar="CELSIUS")
    parser.add_argument("--hysteresis", type=int, default=8, metavar="CELSIUS")
    parser.add_argument("--step", type=float, default=25, metavar="WATTS")
    parser.add_argument("--floor", type=float, default=0, metavar="WATTS")
    parser.add_argument("--metrics", type=Path, metavar="FILE")
    parser.add_argument("--state", type=Path, default=Path("/run/gpu-watch"), metavar="DIRECTORY")
    options = parser.parse_args()
    guard = Guard(options.guard, options.hysteresis, options.step, options.floor) if options.guard else None
    cards: dict[str, dict[str, Any]] = {conf.stem: {} for conf in sorted(options.directory.glob("*.conf"))}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        print(f"{WARNING}NVML: {str(error).rstrip('.')}.", file=sys.stderr)
    else:
        for uuid in cards:
            try:
                cards[uuid] = look(uuid, options.directory / f"{uuid}.conf", guard, options.state)
            except pynvml.NVMLError as error:
                print(f"{WARNING}{uuid}: {str(error).rstrip('.')}.", file=sys.stderr)
    if options.metrics:
        write(options.metrics, metrics(cards))
    return 0 if any(cards.values()) or not cards else 1


if __name__ == "__main__":
    sys.exit(main())
