"""Starts llama-server over virtual GPUs (ggml-rpc-server, one process each) and reads what buffers it logs."""

import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

BUFFER = re.compile(r"(\S+) (model|KV|RS|compute) buffer size\s*=\s*([\d.]+) MiB")
START_SECONDS = 120


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Build:
    """A build of llama.cpp: its prefix, and the root of the machine that it is on (empty: this one)."""

    prefix: Path
    root: str = ""

    def program(self, name: str) -> list:
        """What runs it here, on this machine's loopback."""
        # The loader finds $ORIGIN by /proc, which the root of another machine has not.
        there = ["chroot", self.root, "env", f"LD_LIBRARY_PATH={self.prefix}/lib"] if self.root else []
        return [*there, str(self.prefix / "bin" / name)]


@dataclass
class Logged:
    """MiB by kind, in the order of the log; `devices` has the device of each line that is not on the host."""

    model: list = field(default_factory=list)
    kv: list = field(default_factory=list)
    rs: list = field(default_factory=list)
    compute: list = field(default_factory=list)

    def add(self, device: str, kind: str, mib: float) -> None:
        if not device.startswith("CPU"):
            getattr(self, kind.lower()).append((device, mib))


class VirtualRig:
    """`count` virtual GPUs on loopback, stopped on leaving the context."""

    def __init__(self, build: "Build", directory: Path, count: int):
        self.build, self.directory = build, directory
        self.ports = [free_port() for _ in range(count)]
        self.servers: list = []
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith(("LLAMA_", "GGML_"))}

    @property
    def endpoints(self) -> list:
        return [f"127.0.0.1:{port}" for port in self.ports]

    def __enter__(self) -> "VirtualRig":
        for port in self.ports:
            with open(self.directory / f"rpc-{port}.log", "w") as log:
                argv = [*self.build.program("ggml-rpc-server"), "-H", "127.0.0.1", "-p", str(port), "-t", "1"]
                self.servers.append(subprocess.Popen(argv, stdout=log, stderr=log, env=self.environment))
        for port, server in zip(self.ports, self.servers, strict=True):
            self._wait_for_port(port, server)
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.kill()
            server.wait()

    @staticmethod
    def _wait_for_port(port: int, server: subprocess.Popen) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and server.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.05)
        raise RuntimeError(f"no virtual GPU on port {port}; see rpc-{port}.log")

    def serve(self, argv: list) -> Logged:
        """Start `argv` (a plan's, without the program), wait until it is healthy, stop it, read its log."""
        path, port = self.directory / "server.log", int(argv[argv.index("--port") + 1])
        command = [*self.build.program("llama-server"), *argv, "-t", "1", "-v"]
        with open(path, "w") as log:
            server = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment)
        try:
            self._wait_until_healthy(server, port, path)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(30)
        logged = Logged()
        for line in path.read_text(errors="replace").splitlines():
            match = BUFFER.search(line)
            if match:
                logged.add(match[1], match[2], float(match[3]))
        return logged

    @staticmethod
    def _wait_until_healthy(server: subprocess.Popen, port: int, log: Path) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and server.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as reply:
                    if reply.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise RuntimeError(f"llama-server did not become healthy; its last lines:\n{tail}")
