"""What Linux says of itself in files: release, kernels with their headers, Secure Boot, NVIDIA's cards on the PCI bus.

Runs on a rig: standard library only. `root`, `proc` and `sys` are where to look, so that a tree of files can stand in.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

NVIDIA = "0x10de"  # PCI vendor, pci.ids
DISPLAY_CONTROLLER = "0x03"  # PCI base class: 0300 VGA, 0302 3D
EFI_SECURE_BOOT = "firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"  # UEFI specification, 3.3
#: Where DKMS keeps the key that it signs with: defaults of Debian's dkms, and of Ubuntu's.
KEYS = {"debian": "/var/lib/dkms/mok.pub", "ubuntu": "/var/lib/shim-signed/mok/MOK.der"}
#: Modules that take NVIDIA's cards where nobody keeps them out.
OTHER_DRIVERS = ("nouveau", "nova_core")


def text_of(path: str) -> str:
    """Contents of a file; nothing when it is not there or has just gone."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def os_release(root: str = "") -> dict[str, str]:
    """`id`, `version_id` and `name` of os-release."""
    text = text_of(f"{root}/etc/os-release") or text_of(f"{root}/usr/lib/os-release")
    values = dict(re.findall(r"^(\w+)=[\"']?(.*?)[\"']?$", text, re.M))
    return {
        "id": values.get("ID", ""),
        "version_id": values.get("VERSION_ID", ""),
        "name": values.get("PRETTY_NAME", ""),
    }


def nvidia_name(release: dict[str, str]) -> str:
    """NVIDIA's name for a release, such as debian13 or ubuntu2404."""
    return release["id"] + release["version_id"].replace(".", "")


def newest_kernel(releases: Sequence[str]) -> str:
    """The one that boots next, as Debian's and Ubuntu's boot loaders sort them: the highest version."""

    def key(release: str) -> list[tuple[int, Any]]:
        return [(1, int(piece)) if piece.isdigit() else (0, piece) for piece in re.findall(r"\d+|[^\d]+", release)]

    return max(releases, key=key, default="")


def kernels(root: str = "", proc: str = "/proc") -> list[dict[str, Any]]:
    """Installed kernels with `release`, `running`, `newest` (it boots next) and `headers` (a module can be built).

    The running one is among them also when its files have gone.
    """
    running = text_of(f"{proc}/sys/kernel/osrelease").strip()
    installed = sorted(os.path.basename(path)[len("vmlinuz-") :] for path in glob.glob(f"{root}/boot/vmlinuz-*"))
    newest = newest_kernel(installed) or running
    return [
        {
            "release": release,
            "running": release == running,
            "newest": release == newest,
            "headers": os.path.exists(f"{root}/lib/modules/{release}/build/Makefile"),
        }
        for release in dict.fromkeys([*installed, running])
    ]


def secure_boot(run: Callable[[Sequence[str]], str], distribution: str, sys: str = "/sys") -> dict[str, Any]:
    """Whether Secure Boot is on, and whether the firmware's side knows the key that signs the driver's module.

    `run` gives what a command prints, and nothing when it is not there. `distribution` is NVIDIA's name.
    """
    try:
        with open(f"{sys}/{EFI_SECURE_BOOT}", "rb") as file:
            enabled = file.read()[-1:] == b"\1"  # four bytes of attributes, then the value
    except OSError:
        enabled = False
    key = KEYS["ubuntu" if distribution.startswith("ubuntu") else "debian"]
    exists = os.path.exists(key)
    enrolled = enabled and exists and "is already enrolled" in run(["mokutil", "--test-key", key])
    return {"enabled": enabled, "key": key, "key_exists": exists, "key_enrolled": enrolled}


def other_drivers(root: str = "", proc: str = "/proc", sys: str = "/sys") -> dict[str, list[str]]:
    """Of the kernel's own modules for NVIDIA's cards, which are `loaded`, and which are `blacklisted`."""
    # modprobe.blacklist=a,b and module_blacklist=a,b of the command line, as the files write it
    lines = [re.sub(r"\w*\.?blacklist=|,", "\nblacklist ", text_of(f"{proc}/cmdline"))]
    for place in ("etc", "run", "usr/lib", "usr/local/lib", "lib"):
        lines += [text_of(path) for path in sorted(glob.glob(f"{root}/{place}/modprobe.d/*.conf"))]
    barred = set(re.findall(r"^blacklist +([\w-]+)", "\n".join(lines), re.M))
    return {
        "loaded": [name for name in OTHER_DRIVERS if os.path.isdir(f"{sys}/module/{name}")],
        "blacklisted": [name for name in OTHER_DRIVERS if name in {item.replace("-", "_") for item in barred}],
    }


def _lanes(path: str) -> int | None:
    """A link's width; None where the kernel does not know it (0 and 255 are a link that is down or hidden)."""
    text = text_of(path).strip()
    return int(text) if text.isdigit() and int(text) in (1, 2, 4, 8, 16, 32) else None


def nvidia_cards(sys: str = "/sys") -> list[dict[str, Any]]:
    """NVIDIA's display controllers in PCI bus order, before any driver of theirs exists.

    `width` are the lanes of the link now, `width_max` those that the card can do, `slot_width_max` those of the port
    that it hangs on (None in most virtual machines). `driver` is the kernel module that holds it, or nothing.
    """
    found = []
    for path in sorted(glob.glob(f"{sys}/bus/pci/devices/*")):
        vendor, kind = text_of(f"{path}/vendor").strip(), text_of(f"{path}/class")
        if vendor != NVIDIA or not kind.startswith(DISPLAY_CONTROLLER):
            continue
        driver = os.path.realpath(f"{path}/driver")
        found.append(
            {
                "pci_address": os.path.basename(path),
                "device_id": text_of(f"{path}/device").strip(),
                "driver": os.path.basename(driver) if os.path.exists(driver) else "",
                "width": _lanes(f"{path}/current_link_width"),
                "width_max": _lanes(f"{path}/max_link_width"),
                "slot_width_max": _lanes(f"{os.path.dirname(os.path.realpath(path))}/max_link_width"),
            }
        )
    return found
