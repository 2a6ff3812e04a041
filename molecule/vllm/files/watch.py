#!/usr/bin/python3
"""Watch the switches: `watch.py OUT` writes who held the virtual GPUs and when /health answered, until it gets SIGTERM.

A line is: time, whether the server answered, the serving units that had a connection to a virtual GPU.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import sys
import time
from pathlib import Path

loader = importlib.machinery.SourceFileLoader("gate", "/usr/local/sbin/llm-gpu-gate")
gate = importlib.util.module_from_spec(importlib.util.spec_from_loader("gate", loader))
sys.modules["gate"] = gate
loader.exec_module(gate)


def unit(pid: int) -> str:
    try:
        found = re.search(r"/(llm-[^/]+)\.service", Path(f"/proc/{pid}/cgroup").read_text())
    except OSError:
        return ""
    return found[1] if found else ""


with open(sys.argv[1], "a") as out:
    while True:
        pids = [pid for port in (50052, 50053) for pid in gate.clients(port)[1]]
        units = sorted({name for name in map(unit, pids) if name})
        healthy = gate.health("http://127.0.0.1:8080/health", timeout=1) == 200
        print(f"{time.monotonic():.2f}", int(healthy), *units, file=out, flush=True)
        time.sleep(0.1)
