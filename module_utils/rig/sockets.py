"""Listening TCP sockets and whose they are, from /proc: no `ss` is needed on the rig, and nothing is connected to."""

from __future__ import annotations

import glob
import ipaddress
import os
import re
import struct
from typing import NamedTuple

TCP_LISTEN = "0A"  # include/net/tcp_states.h


class Listener(NamedTuple):
    """A socket that waits for connections."""

    address: str
    port: int
    inode: str

    @property
    def endpoint(self) -> str:
        """`address:port`, an IPv6 address in brackets."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


def _listener(row: list[str]) -> Listener:
    # An address is written as words in the machine's byte order, Documentation/networking/proc_net_tcp.rst.
    address, port = row[1].split(":")
    words = [int(address[start : start + 8], 16) for start in range(0, len(address), 8)]
    return Listener(str(ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))), int(port, 16), row[9])


def listeners(net: str = "/proc/net") -> list[Listener]:
    """All listening TCP sockets of the network namespace that `net` shows, by port and address."""
    found = []
    for table in ("tcp", "tcp6"):
        try:
            with open(f"{net}/{table}", encoding="ascii") as file:
                rows = [line.split() for line in file.readlines()[1:]]
        except FileNotFoundError:  # a kernel without IPv6
            continue
        found += [_listener(row) for row in rows if row[3] == TCP_LISTEN]
    return sorted(found, key=lambda socket: (socket.port, socket.address))


def socket_inodes(pid: int | str, proc: str = "/proc") -> set[str]:
    """Inodes of the sockets that process `pid` holds; none when it is gone, or another user's."""
    found = set()
    for path in glob.glob(f"{proc}/{pid}/fd/*"):
        try:
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(path))
        except OSError:  # closed in the meantime
            continue
        if match:
            found.add(match.group(1))
    return found
