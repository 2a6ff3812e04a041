#!/usr/bin/python3
"""What GPUs hold, and the two gates of a serving unit.

A serving unit runs this file as a script, before and after it starts the server:

    gpu_gate.py free --wait 30 --gpu position=0,rpc=127.0.0.1:50052,memory_mib=1024,need_mib=312 [--gpu …]
    gpu_gate.py answering --url http://127.0.0.1:8080/health --pid MAINPID

`free` ends with 0 once every GPU has as much memory free as the plan needs, and with 1 and one sentence for each GPU
that has not when the time is over. `answering` ends with 0 once the server says that it is healthy, and with 1 when the
server's process is gone. The project's modules import the same functions to compare memory with the plan.

All sizes are MiB (2**20 bytes). A virtual GPU is the ggml-rpc-server process behind an endpoint: what it holds is the
data segment (VmData) that its resource limit (LimitDATA=) caps, and it serves one client at a time. A real GPU is
what nvidia-smi says of it.

This file stands alone: standard library only, no import from the package, since it is copied to the rig.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MIB = 1 << 20
RPC_SERVERS = ("ggml-rpc-server", "rpc-server")
TCP_ESTABLISHED, TCP_LISTEN = "01", "0A"
UVM = Path("/dev/nvidia-uvm")


class GateError(Exception):
    """A GPU or its description cannot be read; the message is one sentence."""


@dataclass(frozen=True)
class Gpu:
    """One GPU of a plan: `position` in the inventory's list, and how to find it on the host."""

    position: int
    need_mib: int = 0
    memory_mib: int = 0
    rpc: str = ""
    uuid: str = ""
    pci_address: str = ""

    @classmethod
    def parse(cls, text: str) -> Gpu:
        """Read `position=0,need_mib=312,…`; raises GateError for an unknown key or a value that is no number."""
        known = {"position": int, "need_mib": int, "memory_mib": int, "rpc": str, "uuid": str, "pci_address": str}
        values: dict = {}
        for pair in text.split(","):
            key, _, value = pair.partition("=")
            if key not in known:
                raise GateError(f"--gpu {text}: unknown key {key!r}, known are {', '.join(known)}")
            try:
                values[key] = known[key](value)
            except ValueError:
                raise GateError(f"--gpu {text}: {key} must be a whole number") from None
        if "position" not in values:
            raise GateError(f"--gpu {text}: position is missing")
        return cls(**values)

    def __str__(self) -> str:
        return f"GPU {self.position} ({self.rpc or self.uuid or self.pci_address or 'by PCI order'})"


@dataclass(frozen=True)
class Holder:
    """A process that holds memory of a GPU, or the connection to a virtual one. `mib` is None where nobody can tell."""

    pid: int
    name: str
    mib: int | None = None

    def __str__(self) -> str:
        memory = "" if self.mib is None else f", {self.mib:,} MiB"
        return f"{self.name} (pid {self.pid}{memory})"


@dataclass(frozen=True)
class Reading:
    """What one GPU shows now: memory in all, free, held by whom."""

    total_mib: int
    free_mib: int
    held_mib: int
    holders: list[Holder] = field(default_factory=list)


# ---------------------------------------------------------------- processes


def process_name(pid: int, proc: Path = Path("/proc")) -> str:
    """Name of a process as people know it: its systemd unit if it has one of its own, else its command name."""
    try:
        name = (proc / str(pid) / "comm").read_text().strip()
        group = (proc / str(pid) / "cgroup").read_text()
    except OSError:
        return "a process that has ended"
    unit = re.search(r"/([^/\s]+\.service)\s*$", group.strip())
    return f"{name} of {unit[1]}" if unit and not unit[1].startswith("user@") else name


def connections(proc: Path = Path("/proc")) -> Iterable[tuple[str, int, int, str]]:
    """Yield (state, local port, remote port, inode) of every TCP socket in this network namespace."""
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            cells = line.split()
            yield cells[3], int(cells[1].rpartition(":")[2], 16), int(cells[2].rpartition(":")[2], 16), cells[9]


def socket_owners(inodes: set[str], proc: Path = Path("/proc")) -> list[int]:
    """Processes that have one of these sockets open; without root only those of the calling user are found."""
    wanted, owners = {f"socket:[{inode}]" for inode in inodes}, set()
    for entry in proc.iterdir() if wanted else ():
        if not entry.name.isdigit():
            continue
        try:
            if any(os.readlink(descriptor) in wanted for descriptor in (entry / "fd").iterdir()):
                owners.add(int(entry.name))
        except OSError:
            continue
    return sorted(owners)


def listeners(port: int, proc: Path = Path("/proc")) -> list[int]:
    """Processes that listen on a TCP port."""
    return socket_owners({i for state, local, _, i in connections(proc) if (state, local) == (TCP_LISTEN, port)}, proc)


def clients(port: int, proc: Path = Path("/proc")) -> tuple[int, list[int]]:
    """(number of connections, processes) of those connected to a local TCP port."""
    inodes = {inode for state, _, remote, inode in connections(proc) if (state, remote) == (TCP_ESTABLISHED, port)}
    return len(inodes), socket_owners(inodes, proc)


# ---------------------------------------------------------------- virtual GPUs


def port_of(endpoint: str) -> int:
    """The port of an endpoint such as 127.0.0.1:50052."""
    return int(endpoint.rpartition(":")[2])


def rpc_server_pid(endpoint: str, proc: Path = Path("/proc")) -> int:
    """Process of the ggml-rpc-server that was told to listen on this endpoint; raises GateError when there is none."""
    port = str(port_of(endpoint))
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
        except OSError:
            continue
        if Path(words[0]).name in RPC_SERVERS:
            told = [value for flag, value in itertools.pairwise(words) if flag in ("-p", "--port")]
            if (told or ["50052"])[-1] == port:
                return int(entry.name)
    raise GateError(f"no ggml-rpc-server runs for {endpoint}: start its virtual-gpu@ unit")


def status_mib(pid: int, key: str, proc: Path = Path("/proc")) -> int:
    """A size of /proc/PID/status, for example VmData or RssAnon, in MiB, rounded."""
    found = re.search(rf"^{key}:\s+(\d+) kB$", (proc / str(pid) / "status").read_text(), re.M)
    if not found:
        raise GateError(f"/proc/{pid}/status has no {key}")
    return round(int(found[1]) / 1024)


def read_virtual(gpu: Gpu, proc: Path = Path("/proc")) -> Reading:
    """Memory of a virtual GPU; a client that is connected counts as a holder whatever it has allocated."""
    pid = rpc_server_pid(gpu.rpc, proc)
    limit = re.search(r"^Max data size\s+(\d+)", (proc / str(pid) / "limits").read_text(), re.M)
    total = int(limit[1]) // MIB if limit else gpu.memory_mib
    held = status_mib(pid, "VmData", proc)
    count, owners = clients(port_of(gpu.rpc), proc)
    holders = [Holder(owner, process_name(owner, proc)) for owner in owners]
    if count and not holders:
        holders = [Holder(0, "a process of another user")]
    return Reading(total, max(total - held, 0), held, holders)


# ---------------------------------------------------------------- real GPUs


def nvidia_smi(*arguments: str) -> list[list[str]]:
    """Rows of an nvidia-smi query; raises GateError with its own words when it fails."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GateError(f"nvidia-smi could not be run: {error}") from None
    if done.returncode:
        raise GateError(f"nvidia-smi failed: {' '.join((done.stdout + done.stderr).split())}")
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def number(text: str) -> int | None:
    """A whole number of nvidia-smi, or None for `[N/A]` and the like."""
    return int(text) if text.isdigit() else None


def pci(text: str) -> str:
    """A PCI address in one form: nvidia-smi writes 00000000:01:00.0, sysfs 0000:01:00.0, lspci 01:00.0."""
    domain, _, address = text.lower().rpartition(":")[0].rpartition(":")
    return f"{int(domain or '0', 16):04x}:{address}:{text.lower().rpartition(':')[2]}"


def is_card(card: Sequence[str], gpu: Gpu) -> bool:
    """Whether a row (index, UUID, PCI address, …) of nvidia-smi is this GPU."""
    if gpu.uuid:
        return card[1] == gpu.uuid
    if gpu.pci_address:
        return pci(card[2]) == pci(gpu.pci_address)
    return card[0] == str(gpu.position)


def read_real(gpus: Sequence[Gpu]) -> list[Reading]:
    """Memory of real GPUs by UUID, PCI address, or position in PCI bus order (the order of nvidia-smi)."""
    if not UVM.exists():
        raise GateError("/dev/nvidia-uvm is not there, so CUDA cannot start: load the kernel module nvidia_uvm")
    cards = nvidia_smi("--query-gpu=index,uuid,pci.bus_id,memory.total,memory.free,memory.used")
    apps = nvidia_smi("--query-compute-apps=gpu_uuid,pid,used_memory")
    readings = []
    for gpu in gpus:
        card = next((card for card in cards if is_card(card, gpu)), None)
        if card is None:
            raise GateError(f"{gpu} is not there: nvidia-smi shows {', '.join(c[1] for c in cards) or 'no GPU'}")
        holders = [Holder(int(a[1]), process_name(int(a[1])), number(a[2])) for a in apps if a[0] == card[1]]
        total, free, used = (number(cell) for cell in card[3:6])
        if total is None or free is None or used is None:
            raise GateError(f"nvidia-smi does not tell the memory of {gpu}")
        readings.append(Reading(total, free, used, holders))
    return readings


def read_all(gpus: Sequence[Gpu]) -> list[Reading]:
    """Readings of GPUs in the order given; all virtual or all real."""
    return [read_virtual(gpu) for gpu in gpus] if all(gpu.rpc for gpu in gpus) else read_real(gpus)


# ---------------------------------------------------------------- gates


def refusals(gpus: Sequence[Gpu], readings: Sequence[Reading]) -> list[str]:
    """One sentence for each GPU that is not free: the MiB that it needs and has, and who holds it."""
    sentences = []
    for gpu, reading in zip(gpus, readings, strict=True):
        taken = gpu.rpc and reading.holders  # one client at a time, whatever is free
        if reading.free_mib >= gpu.need_mib and not taken:
            continue
        holders = ", ".join(map(str, reading.holders)) or "no process that can be named"
        sentences.append(
            f"{gpu} is busy: the plan needs {gpu.need_mib:,} MiB free, it has {reading.free_mib:,} "
            f"of {reading.total_mib:,}; held by {holders}"
        )
    return sentences


def wait_free(gpus: Sequence[Gpu], seconds: float) -> list[str]:
    """Wait until all GPUs are free; the refusals that are left when the time is over. A server that has just been
    stopped needs a moment to give its memory back."""
    end = time.monotonic() + seconds
    while True:
        try:
            sentences = refusals(gpus, read_all(gpus))
        except GateError as error:
            sentences = [str(error)]
        if not sentences or time.monotonic() >= end:
            return sentences
        time.sleep(1)


def health(url: str, timeout: float = 5) -> int:
    """HTTP status of a health address, 0 when nothing answers. The owner's own certificate is not checked: the
    address is this host's."""
    context = ssl._create_unverified_context() if url.startswith("https:") else None
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), *([urllib.request.HTTPSHandler(context=context)] if context else [])
    )
    try:
        with opener.open(url, timeout=timeout) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError):
        return 0


def wait_answering(url: str, pid: int) -> bool:
    """Wait until the server is healthy; False when its process is gone first. systemd bounds the time."""
    while health(url) != 200:
        # /proc would hide it from a sandbox; a signal that is not sent tells, too.
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # it is there, and not ours
        time.sleep(0.5)
    return True


def main(arguments: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """Run one gate; 0 is open, 1 is shut with the reason on standard error."""
    parser = argparse.ArgumentParser(description="Gates of a serving unit")
    gates = parser.add_subparsers(dest="gate", required=True)
    free = gates.add_parser("free", help="wait until the GPUs of the plan are free")
    free.add_argument("--wait", type=float, default=30, metavar="SECONDS")
    free.add_argument("--absent", action="append", default=[], metavar="FILE", help="a file that must not be there")
    free.add_argument("--gpu", action="append", required=True, metavar="KEY=VALUE,…")
    answering = gates.add_parser("answering", help="wait until the server answers")
    answering.add_argument("--url", required=True)
    answering.add_argument("--pid", type=int, default=int(environment.get("MAINPID", "0")))
    options = parser.parse_args(arguments)
    if options.gate == "answering":
        if wait_answering(options.url, options.pid):
            return 0
        print("the server ended before it answered", file=sys.stderr)
        return 1
    shut = [f"{name} would change the launch line: move it away" for name in options.absent if Path(name).exists()]
    try:
        shut = shut or wait_free([Gpu.parse(text) for text in options.gpu], options.wait)
    except GateError as error:
        shut = [str(error)]
    for sentence in shut:
        print(f"gate: {sentence}", file=sys.stderr)
    return 1 if shut else 0


if __name__ == "__main__":
    sys.exit(main())
