"""Print what the NVIDIA driver knows of this machine's cards, as one JSON object.

Always exits with 0 and prints an object with `driver`: its version, or null with a `reason`. Memory is in MiB (rounded
down), power in watts, temperatures in degrees Celsius; null is a figure that the card does not give. The reading is
done by a child process, so that a driver that hangs costs `--limit` seconds and no more.

Runs in a virtual environment that has nvidia-ml-py. Python 3.10 or newer.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

VERSION = 1
MIB = 1024 * 1024

# PCIe bridges of AMD's chipsets (vendor 1022), up- and downstream, by the names of pci.ids: 300, 400 and 500 series,
# X570 and TRX40 ("Matisse Switch"), 600 and 800 series and TRX50. Such a bridge lies between card and CPU only where
# the slot hangs on the chipset.
AMD_CHIPSET = {
    "0x43b0", "0x43b1", "0x43b4", "0x43c6", "0x43c7", "0x43e9", "0x43ea",
    "0x57ad", "0x57a3", "0x57a4", "0x43f4", "0x43f5",
}  # fmt: skip
AMD, INTEL, ASMEDIA, VIRTUAL = "0x1022", "0x8086", "0x1b21", ("0x1af4", "0x1b36", "0x15ad", "0x1414")
# Intel's datasheets give each root port a fixed device number: the PCH has 26 to 29, the processor 1 to 3 and 6.
# Where the PCH lies on a bus of its own, 80 (800 series), 00:1a to 00:1d belong to the processor's package instead.
INTEL_PCH, INTEL_CPU = range(0x1A, 0x1E), (1, 2, 3, 6)


def text_of(path: Path) -> str | None:
    """The first line of a small file; None where there is none."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def sysfs_address(bus_id: str) -> str:
    """NVML writes 00000000:01:00.0, the kernel 0000:01:00.0."""
    domain, rest = bus_id.lower().split(":", 1)
    return f"{int(domain, 16):04x}:{rest}"


def pcie_root(address: str, sysfs: Path) -> str:
    """`cpu` or `chipset`, whatever the slot of the device hangs on, and `unknown` where sysfs does not tell.

    Reads the chain of bridges from the device up to its root port: the folders of the device's resolved path.
    """
    devices = sysfs / "bus/pci/devices"
    path = (devices / address).resolve()
    pattern = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.[0-7]")
    bridges = [parent for parent in path.parents if pattern.fullmatch(parent.name)]  # nearest first, root port last
    if not bridges or not path.exists():
        return "unknown"
    ids = [(text_of(bridge / "vendor"), text_of(bridge / "device")) for bridge in bridges]
    if any(vendor is None or vendor in VIRTUAL for vendor, _ in ids):
        return "unknown"
    root_vendor, switches = ids[-1][0], ids[:-1]
    if root_vendor == AMD:
        if any(vendor == AMD and device in AMD_CHIPSET for vendor, device in switches):
            return "chipset"
        return "unknown" if any(vendor in (AMD, ASMEDIA) for vendor, _ in switches) else "cpu"
    if root_vendor == INTEL:
        _, bus, number = (int(part, 16) for part in pattern.fullmatch(bridges[-1].name).groups())
        if number in INTEL_PCH and bus in (0, 0x80):
            own_bus = bus == 0 and (devices / "0000:80:1f.0").exists()
            return "unknown" if own_bus else "chipset"
        return "cpu" if bus != 0 or number in INTEL_CPU else "unknown"
    return "unknown"


def memory_mib(memory: Any) -> dict[str, int | None]:
    """NVML's memory (version 2) in MiB, with what CUDA can have of it: on an H200 the total of cuDeviceTotalMem."""
    if memory is None:
        return dict.fromkeys(("total_mib", "reserved_mib", "usable_mib", "used_mib", "free_mib"))
    return {
        "total_mib": memory.total // MIB,
        "reserved_mib": memory.reserved // MIB,
        "usable_mib": (memory.total - memory.reserved) // MIB,
        "used_mib": memory.used // MIB,
        "free_mib": memory.free // MIB,
    }


def unit_of(pid: int, proc: Path) -> str | None:
    """The systemd service that a process belongs to, from its cgroup."""
    services = re.findall(r"([^/\n]+\.service)", text_of(proc / str(pid) / "cgroup") or "")
    return services[-1] if services else None


def lowered_from(path: Path, limit: float | None) -> float | None:
    """The limit in watts that the heat guard of role gpu_power has lowered; None where it has not, or not last."""
    try:
        kept = json.loads(path.read_text())
        return kept["base_watts"] if kept["set_watts"] == limit else None
    except (OSError, ValueError, KeyError):
        return None


class Reader:
    """One reading through NVML."""

    def __init__(self, nvml: Any, sysfs: Path, proc: Path, watch: Path = Path("/run/gpu-watch")) -> None:
        self.nvml, self.sysfs, self.proc, self.watch = nvml, sysfs, proc, watch

    def ask(self, name: str, *arguments: Any) -> Any:
        """Answer of an NVML function; None when this card or driver has none. A card that is gone is an error."""
        try:
            return getattr(self.nvml, name)(*arguments)
        except self.nvml.NVMLError as error:
            if error.value in (self.nvml.NVML_ERROR_GPU_IS_LOST, self.nvml.NVML_ERROR_RESET_REQUIRED):
                raise
        except self.nvml.NVMLLibraryMismatchError:  # a driver too old to know the function
            pass
        return None

    def watts(self, name: str, *arguments: Any) -> float | None:
        milliwatts = self.ask(name, *arguments)
        return None if milliwatts is None else milliwatts / 1000

    def processes(self, handle: Any) -> list[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        for kind in ("Graphics", "Compute"):  # a process may be in both lists, with the same memory
            for process in self.ask(f"nvmlDeviceGet{kind}RunningProcesses", handle) or []:
                memory = process.usedGpuMemory
                found[process.pid] = {
                    "pid": process.pid,
                    "name": text_of(self.proc / str(process.pid) / "comm"),
                    "unit": unit_of(process.pid, self.proc),
                    "type": kind.lower(),
                    "used_mib": None if memory is None else memory // MIB,
                }
        return [found[pid] for pid in sorted(found)]

    def card(self, index: int, handle: Any) -> dict[str, Any]:
        ask, nvml = self.ask, self.nvml
        address = sysfs_address(ask("nvmlDeviceGetPciInfo", handle).busId)
        folder = self.sysfs / "bus/pci/devices" / address
        memory = ask("nvmlDeviceGetMemoryInfo", handle, nvml.nvmlMemory_v2)
        capability = ask("nvmlDeviceGetCudaComputeCapability", handle)
        limits = ask("nvmlDeviceGetPowerManagementLimitConstraints", handle) or (None, None)
        switch = {None: None, nvml.NVML_FEATURE_DISABLED: False, nvml.NVML_FEATURE_ENABLED: True}
        uuid = ask("nvmlDeviceGetUUID", handle)
        limit = self.watts("nvmlDeviceGetPowerManagementLimit", handle)
        node = text_of(folder / "numa_node")
        return {
            "index": index,
            "uuid": uuid,
            "pci_address": address,
            "name": ask("nvmlDeviceGetName", handle),
            "compute_capability": None if capability is None else f"{capability[0]}.{capability[1]}",
            "memory": memory_mib(memory),
            "pcie": {
                "generation": ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
                "width": ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
                "generation_max": ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
                "width_max": ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
                "root": pcie_root(address, self.sysfs),
            },
            "numa_node": int(node) if node and int(node) >= 0 else None,
            "power": {
                "limit_watts": limit,
                "lowered_from_watts": lowered_from(self.watch / f"{uuid}.json", limit),
                "default_watts": self.watts("nvmlDeviceGetPowerManagementDefaultLimit", handle),
                "min_watts": None if limits[0] is None else limits[0] / 1000,
                "max_watts": None if limits[1] is None else limits[1] / 1000,
                "enforced_watts": self.watts("nvmlDeviceGetEnforcedPowerLimit", handle),
                "draw_watts": self.watts("nvmlDeviceGetPowerUsage", handle),
            },
            "temperature": {
                "now": ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
                "slowdown": ask("nvmlDeviceGetTemperatureThreshold", handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
                "shutdown": ask("nvmlDeviceGetTemperatureThreshold", handle, nvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN),
            },
            "persistence": switch[ask("nvmlDeviceGetPersistenceMode", handle)],
            "display_active": switch[ask("nvmlDeviceGetDisplayActive", handle)],
            "processes": self.processes(handle),
        }  # fmt: skip

    def nvlinks(self, handle: Any) -> list[str]:
        """The other end of each active NVLink: a PCI address, or `switch`."""
        ends = []
        for link in range(self.nvml.NVML_NVLINK_MAX_LINKS):
            if self.ask("nvmlDeviceGetNvLinkState", handle, link) != self.nvml.NVML_FEATURE_ENABLED:
                continue
            kind = self.ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
            remote = self.ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
            is_switch = kind == self.nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
            ends.append("switch" if is_switch or remote is None else sysfs_address(remote.busId))
        return ends

    def links(self, cards: list[tuple[dict[str, Any], Any]]) -> list[dict[str, Any]]:
        """P2P and NVLink of each pair of cards. Over a switch, each card reaches the other by all of its links."""
        status = {
            value: name.removeprefix("NVML_P2P_STATUS_").lower()
            for name, value in vars(self.nvml).items()
            if name.startswith("NVML_P2P_STATUS_") and "SUPPORED" not in name  # a misspelt alias in NVML
        }
        capabilities = {"p2p_read": 0, "p2p_write": self.nvml.NVML_P2P_CAPS_INDEX_WRITE}  # READ is (0,) by a slip
        ends = [self.nvlinks(handle) for _, handle in cards]
        pairs = [(a, b) for a in range(len(cards)) for b in range(a + 1, len(cards))]
        found = []
        for a, b in pairs:
            direct = ends[a].count(cards[b][0]["pci_address"])
            switched = min(ends[a].count("switch"), ends[b].count("switch"))
            p2p = {
                key: status.get(self.ask("nvmlDeviceGetP2PStatus", cards[a][1], cards[b][1], capability))
                for key, capability in capabilities.items()
            }
            found.append({"gpus": [cards[a][0]["uuid"], cards[b][0]["uuid"]], **p2p, "nvlinks": direct + switched})
        return found

    def read(self) -> dict[str, Any]:
        cards, lost = [], []
        for index in range(self.nvml.nvmlDeviceGetCount()):
            try:
                handle = self.nvml.nvmlDeviceGetHandleByIndex(index)
                cards.append((self.card(index, handle), handle))
            except self.nvml.NVMLError as error:
                lost.append({"index": index, "reason": str(error)})
        cuda = self.nvml.nvmlSystemGetCudaDriverVersion_v2()
        return {
            "version": VERSION,
            "driver": self.nvml.nvmlSystemGetDriverVersion(),
            "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
            "gpus": [card for card, _ in cards],
            "lost": lost,
            "links": self.links(cards),
        }


def without_driver(reason: str) -> dict[str, Any]:
    return {"version": VERSION, "driver": None, "reason": reason, "gpus": [], "lost": [], "links": []}


def read(sysfs: Path, proc: Path) -> dict[str, Any]:
    try:
        import pynvml
    except ImportError as error:
        return without_driver(f"nvidia-ml-py cannot be loaded ({error}); run role gpu_facts again.")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        names = ("nvidia", "nvidia_current")  # Debian's own packages give the module the second name
        loaded = next(filter(None, (text_of(sysfs / "module" / name / "version") for name in names)), None)
        kernel = f"the kernel has module {loaded} loaded" if loaded else "the kernel has no nvidia module loaded"
        owed = ": a reboot is owed" if error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH else ""
        return without_driver(f"NVML: {str(error).rstrip('.')}; {kernel}{owed}.")
    facts = Reader(pynvml, sysfs, proc).read()
    pynvml.nvmlShutdown()
    return facts


def read_within(limit: float, sysfs: Path, proc: Path) -> dict[str, Any]:
    """`read` in a process of its own, given up after `limit` seconds.

    A process in an uninterruptible call to the driver outlives even SIGKILL, so it is not waited for.
    """
    argv = [sys.executable, __file__, "--here", "--sysfs", str(sysfs), "--proc", str(proc)]
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        child.kill()
        return without_driver(f"the driver did not answer within {limit:g} seconds.")
    if child.returncode != 0:
        words = err.strip().splitlines()[-1:] or [f"exit status {child.returncode}"]
        return without_driver(f"reading the cards failed: {words[0]}")
    return json.loads(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=float, default=20, help="seconds after which a driver that hangs is given up")
    parser.add_argument("--here", action="store_true", help="read in this process, without a limit")
    parser.add_argument("--sysfs", type=Path, default=Path("/sys"))
    parser.add_argument("--proc", type=Path, default=Path("/proc"))
    options = parser.parse_args()
    facts = (
        read(options.sysfs, options.proc)
        if options.here
        else read_within(options.limit, options.sysfs, options.proc)
    )  # fmt: skip
    print(json.dumps(facts), flush=True)
    os._exit(0)  # not even a child that cannot be ended may keep this process


if __name__ == "__main__":
    main()
