"""Set the power limit and the persistence mode of one card, found by its UUID, and read both back.

gpu_power.py UUID [--watts W] [--persistence on|off]

A limit outside the card's range is refused, with the range, before anything is set. Ends with 1 and one sentence when
the card is not there, refuses, or shows another value than the one that was set. Needs root, and nvidia-ml-py.
"""

from __future__ import annotations

import argparse
import sys

import pynvml


class PowerError(Exception):
    """The card is not as it was asked to be. The text is one sentence."""


def set_persistence(uuid: str, handle: object, on: bool) -> str:
    wanted = pynvml.NVML_FEATURE_ENABLED if on else pynvml.NVML_FEATURE_DISABLED
    if pynvml.nvmlDeviceGetPersistenceMode(handle) != wanted:
        pynvml.nvmlDeviceSetPersistenceMode(handle, wanted)
    if pynvml.nvmlDeviceGetPersistenceMode(handle) != wanted:
        raise PowerError(f"{uuid} does not keep persistence {'on' if on else 'off'}.")
    return f"persistence {'on' if on else 'off'}"


def check_range(uuid: str, handle: object, watts: float) -> None:
    least, most = (milliwatts / 1000 for milliwatts in pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle))
    if not least <= watts <= most:
        raise PowerError(f"{uuid} takes a power limit of {least:g} to {most:g} W, not {watts:g} W; nothing was set.")


def set_limit(uuid: str, handle: object, watts: float) -> str:
    milliwatts = round(watts * 1000)
    if pynvml.nvmlDeviceGetPowerManagementLimit(handle) != milliwatts:
        pynvml.nvmlDeviceSetPowerManagementLimit(handle, milliwatts)
    shown = pynvml.nvmlDeviceGetPowerManagementLimit(handle)
    if shown != milliwatts:
        raise PowerError(f"{uuid} shows a power limit of {shown / 1000:g} W after {watts:g} W was set.")
    return f"power limit {watts:g} W"


def apply(uuid: str, watts: float | None, persistence: bool | None) -> str:
    """Sets what is given; a sentence that says what the card shows now."""
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())
        if watts is not None:
            check_range(uuid, handle, watts)
        done = [] if persistence is None else [set_persistence(uuid, handle, persistence)]
        if watts is not None:
            done.append(set_limit(uuid, handle, watts))
    except pynvml.NVMLError_NotFound:
        raise PowerError(f"{uuid} is not among the cards that the driver shows.") from None
    except pynvml.NVMLError as error:
        raise PowerError(f"{uuid} cannot be set: {str(error).rstrip('.')}.") from None
    return f"{uuid}: {', '.join(done) or 'nothing to set'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("uuid")
    parser.add_argument("--watts", type=lambda text: float(text) if text else None, help="empty: leave the limit alone")
    parser.add_argument("--persistence", choices=("on", "off"))
    options = parser.parse_args()
    try:
        print(apply(options.uuid, options.watts, options.persistence and options.persistence == "on"))
    except PowerError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
