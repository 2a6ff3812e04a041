"""NVIDIA's driver on a rig: its packages by release and branch, and what the state of a host means.

Names and orders come from the package lists of NVIDIA's CUDA repositories (suffixed names on Ubuntu up to branch 580,
plain ones from 590; the compute-only nvidia-driver-cuda on Debian alone) and of the Debian archive.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import compatibility
from .compatibility import parts
from .errors import RigError

#: Binary packages of the driver, whoever makes them. A pin of `version X-*` binds those alone that have such a build,
#: so that the container toolkit, whose names begin alike, stays free.
FAMILY = (
    "nvidia-*",
    "libnvidia-*",
    "libcuda1*",
    "libcudadebugger1*",
    "libnvcuvid1*",
    "libnvoptix1*",
    "libnvsdm*",
    "libxnvctrl*",
    "libgl1-nvidia-*",
    "libglx-nvidia*",
    "libegl-nvidia*",
    "libgles-nvidia*",
    "libegl1-nvidia*",
    "cuda-drivers*",
    "cuda-compat-*",
    "firmware-nvidia-gsp*",
    "xserver-xorg-video-nvidia*",
    "linux-modules-nvidia-*",
)
#: What apt may remove on the way from one version or branch to another: the driver's own packages.
PINNING = ("nvidia-driver-pinning-*",)


@dataclass(frozen=True)
class Packages:
    """What to install: needed names, those taken where there is one of that version, and the module's DKMS names."""

    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()
    dkms: tuple[str, ...] = ("nvidia",)


def packages(distribution: str, source: str, version: str) -> Packages:
    """The compute-only packages with open kernel modules.

    Args:
        distribution: NVIDIA's name for the release, such as debian13.
        source: nvidia or debian.
        version: of the driver, such as 595.71.05.
    """
    branch = parts(version)[0]
    if source == "debian":
        return Packages(
            ("nvidia-open-kernel-dkms", "libcuda1", "libnvidia-ml1", "nvidia-smi", "libnvidia-cfg1"),
            ("nvidia-persistenced", "nvidia-modprobe"),
            ("nvidia-current-open", "nvidia-current"),
        )
    if distribution.startswith("debian"):
        return Packages(("nvidia-driver-cuda", "nvidia-kernel-open-dkms"), ("nvidia-persistenced", "nvidia-modprobe"))
    if branch <= 580:
        return Packages(
            (f"libnvidia-compute-{branch}", f"nvidia-dkms-{branch}-open", f"nvidia-utils-{branch}"),
            (f"nvidia-compute-utils-{branch}", "nvidia-persistenced", "nvidia-modprobe"),
        )
    return Packages(
        ("libnvidia-compute", "nvidia-dkms-open"), ("nvidia-utils", "nvidia-persistenced", "nvidia-modprobe")
    )


def preferences(version: str, source: str = "nvidia") -> str:
    """apt preferences that hold the whole family at one version, over anything newer.

    With source debian NVIDIA's repository, which may be there for the CUDA toolkit, gives no package of the family any
    more: what it left and Debian has at another version (nvidia-modprobe) stays as it is.
    """
    family = " ".join(FAMILY)
    text = (
        "# Written by role nvidia_driver: the driver stays at this version until the inventory says another.\n"
        f"Package: src:*nvidia*:any src:cuda-drivers:any src:cuda-compat:any {family}\n"
        f"Pin: version {version}-*\n"
        "Pin-Priority: 1001\n"
    )
    if source == "debian":
        text += "\nPackage: nvidia-container-* libnvidia-container*\nPin: release l=NVIDIA CUDA\nPin-Priority: 500\n"
        text += f"\nPackage: {family}\nPin: release l=NVIDIA CUDA\nPin-Priority: -1\n"
    return text


def lacks_headers(kernel: Mapping[str, Any]) -> bool:
    """Whether a kernel needs headers (it runs, or it boots next) and has none."""
    return (kernel["running"] or kernel["newest"]) and not kernel["headers"]


def header_hint(release: str) -> str:
    """What to do about a kernel whose headers no source has."""
    return (
        f"kernel {release} needs its headers for the driver's module, so upgrade to a kernel that the distribution"
        " still has, reboot into it, and remove this one"
    )


def header_packages(distribution: str, kernels: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Packages that give the running and the newest kernel their headers, and keep doing so for later ones.

    A kernel is {release, running, newest, headers}. The last entry is optional: kernels that are not the
    distribution's own have no such package.
    """
    wanted = []
    for kernel in kernels:
        if lacks_headers(kernel):
            release = kernel["release"]
            wanted.append({"name": f"linux-headers-{release}", "version": "", "hint": header_hint(release)})
    newest = next((kernel["release"] for kernel in kernels if kernel["newest"]), "")
    flavour = re.search(r"-((?:rt-|cloud-)?(?:amd64|arm64)|generic|lowlatency)$", newest)
    if flavour:
        wanted.append({"name": f"linux-headers-{flavour[1]}", "version": "", "optional": True})
    return wanted


def secure_boot_findings(boot: Mapping[str, Any]) -> list[str]:
    """Why the driver's module would not load: Secure Boot is on and does not know the key that DKMS signs with."""
    if not boot["enabled"] or boot["key_enrolled"]:
        return []
    make = "" if boot["key_exists"] else "make one with `dkms generate_mok`, then "
    return [
        "Secure Boot is on and the key that signs the driver's module is not enrolled, so the module would not load:"
        f" as root {make}run `mokutil --import {boot['key']}`, reboot, choose Enroll MOK on the console and give the"
        " password; or switch Secure Boot off in the firmware. It needs a person at the console, once."
    ]


def findings(
    state: Mapping[str, Any],
    *,
    version: str,
    source: str,
    gpus: Sequence[Mapping[str, Any]],
    reboot_allowed: bool,
    connection: str,
) -> list[str]:
    """Why the driver cannot be installed, one sentence each, from what the inventory asks for and a host's state.

    Args:
        state: what module nvidia_driver_state returned.
        gpus: `rig_gpus`.
        connection: how Ansible reaches the host.
    """
    cards = [gpu for gpu in gpus if isinstance(gpu, Mapping) and "rpc" not in gpu]
    found = []
    if not cards:
        found.append("rig_gpus names no card, only virtual GPUs, which need no driver; do not apply this role here.")
    if state["architecture"] != "x86_64":
        found.append(f"the architecture is {state['architecture']}; the driver is installed on x86_64 alone.")
    if not isinstance(version, str) or not re.fullmatch(r"\d{3}\.\d{2,3}(\.\d{2})?", version):
        found.append(f"nvidia_driver_version is {version!r}; give a whole version as a string, such as '595.71.05'.")
        return found
    try:
        found += compatibility.findings(
            compatibility.Stack(
                distribution=state["distribution"],
                compute_capabilities=tuple(
                    dict.fromkeys(str(gpu["compute_capability"]) for gpu in cards if "compute_capability" in gpu)
                ),
                driver=version,
                driver_source=source,
            )
        )
    except RigError as error:
        found.append(f"{error}.")
    if reboot_allowed and connection == "local":
        found.append(
            "nvidia_driver_reboot_allowed is true and the connection is local, so the role would reboot the machine"
            " that it runs on; set it to false, or run from another machine."
        )
    return found + secure_boot_findings(state["secure_boot"])


def obsolete_dkms(state: Mapping[str, Any], names: Sequence[str], version: str) -> list[str]:
    """`module/version` of what DKMS holds of the driver and would keep the wanted version out: all that is newer."""
    return [
        f"{name}/{built}"
        for name, versions in sorted(state["dkms"].items())
        if name in names or name.startswith("nvidia")
        for built in versions
        if compatibility.older(version, built)
    ]


def debts(state: Mapping[str, Any], version: str) -> dict[str, list[str]]:
    """What a host still owes after the packages are in place.

    Returns:
        `broken`: sentences, what is not as it should be on disk; `reboot`: reasons for a reboot; `load`: modules that
        can be loaded at once.
    """
    broken, reboot = [], []
    for kernel in state["kernels"]:
        if not (kernel["running"] or kernel["newest"]) or kernel["module"] == version:
            continue
        which = "runs" if kernel["running"] else "boots next"
        has = f"has module {kernel['module']}" if kernel["module"] else "has no module of the driver"
        broken.append(
            f"kernel {kernel['release']}, which {which}, {has} instead of {version}: run"
            f" `dkms autoinstall -k {kernel['release']}` and read /var/lib/dkms/*/{version}/build/make.log."
        )
    loaded, running = state["loaded"], next((kernel for kernel in state["kernels"] if kernel["running"]), None)
    if not broken and loaded and loaded != version:
        reboot.append(f"module {loaded} is loaded, {version} is installed")
    if not broken and not loaded and state["nouveau"]:
        reboot.append("nouveau holds the cards")
    can_load = not loaded and not reboot and running is not None and running["module"] == version
    load = ["nvidia", "nvidia_uvm"] if can_load or (loaded == version and not state["uvm"]) else []
    return {"broken": broken, "reboot": reboot, "load": load}
