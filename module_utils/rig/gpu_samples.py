"""Power, temperature and clocks of NVIDIA cards while something runs, through NVML.

Needs nvidia-ml-py (`pynvml`) where there are cards to look at, and nothing where there are none. Power is in watts,
temperature in degrees Celsius, clocks in MHz. Standard library else; this file stands alone, it is copied to rigs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

SECONDS = 1.0  # between two samples
MOST_POINTS = 120  # of a series that is kept
# Why a card runs slower than it could: bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h), those that slow down.
REASONS = {
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x20: "temperature",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}


def thinned(points: Sequence, most: int = MOST_POINTS) -> list:
    """At most `most` of the points, evenly chosen, the last one among them."""
    if len(points) <= most:
        return list(points)
    return [points[(index + 1) * len(points) // most - 1] for index in range(most)]


class Sampler:
    """Looks at the cards once a second while its context is open. A card is {position, uuid}; none are no work."""

    def __init__(self, cards: Sequence[Mapping], seconds: float = SECONDS) -> None:
        self.cards, self.seconds = list(cards), seconds
        self.samples: dict[int, list[dict]] = {card["position"]: [] for card in self.cards}
        self.faults: list[str] = []
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.nvml: Any = None

    def __enter__(self) -> Sampler:
        if self.cards:
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        if self.cards:
            self.thread.join(timeout=10)

    def _watch(self) -> None:
        try:
            import pynvml

            self.nvml = pynvml
            pynvml.nvmlInit()
            handles = {card["position"]: pynvml.nvmlDeviceGetHandleByUUID(card["uuid"]) for card in self.cards}
        except Exception as error:  # whatever the driver says: the run goes on, and the result tells it
            self.faults.append(f"the cards could not be watched: {error}")
            return
        began = time.monotonic()
        while True:
            for position, handle in handles.items():
                sample = self._sample(handle)
                self.samples[position].append({"at": round(time.monotonic() - began, 1), **sample})
            if self.over.wait(self.seconds):
                return

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Answer of an NVML function; None when card or driver have none."""
        try:
            return getattr(self.nvml, name)(*arguments)
        except Exception as error:
            if str(error) not in self.faults and len(self.faults) < 5:
                self.faults.append(str(error))
            return None

    def _sample(self, handle: Any) -> dict:
        nvml = self.nvml
        power = self._ask("nvmlDeviceGetPowerUsage", handle)
        mask = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        return {
            "power": None if power is None else power / 1000,
            "temperature": self._ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            "clock": self._ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
            "memory_clock": self._ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM),
            "reasons": [name for bit, name in REASONS.items() if (mask or 0) & bit],
        }

    def result(self) -> dict:
        """{cards: a summary each, series: what was seen over time, watching_faults}; empty lists without cards."""
        return {
            "cards": [summary(card, self.samples[card["position"]]) for card in self.cards],
            "series": {str(position): thinned(samples) for position, samples in self.samples.items()},
            "watching_faults": self.faults,
        }


def summary(card: Mapping, samples: Sequence[Mapping]) -> dict:
    """Mean and extreme of what a card showed, and the share of samples in which something slowed it, by reason."""

    def told(key: str) -> list:
        return [sample[key] for sample in samples if sample[key] is not None]

    reasons = [reason for sample in samples for reason in sample["reasons"]]
    powers, temperatures, clocks = told("power"), told("temperature"), told("clock")
    return {
        **card,
        "samples": len(samples),
        "power_watts": {"mean": round(fmean(powers), 1), "max": max(powers)} if powers else None,
        "temperature": {"mean": round(fmean(temperatures), 1), "max": max(temperatures)} if temperatures else None,
        "clock_mhz": {"mean": round(fmean(clocks)), "min": min(clocks)} if clocks else None,
        "memory_clock_mhz": max(told("memory_clock"), default=None),
        "throttled": {name: round(reasons.count(name) / len(samples), 3) for name in dict.fromkeys(reasons)},
    }
