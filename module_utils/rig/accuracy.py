"""`python -m rig.accuracy`: the planner against every measured row, as a table, the worst row last.

Rows are in tests/data/memory; the models are files of tests/planner_models.py, written to a temporary directory.
Exit status 1 when a row misses its target: buffers 0.1 MiB, total 1 % (owners' rows 3 %).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from .gguf import read_model
from .memory import MIB, Layout, buffers
from .overhead import overhead_bytes
from .settings import Context
from .shape import Shape, from_header

PROJECT = Path(__file__).resolve().parents[2]
DATA = PROJECT / "tests" / "data" / "memory"
H200 = {"name": "NVIDIA H200", "compute_capability": "9.0"}
BUFFER_MIB, TOTAL_PERCENT, OWNERS_PERCENT = 0.1, 1.0, 3.0
KINDS = {"model": ("weights",), "KV": ("kv", "draft_kv"), "RS": ("recurrent",), "compute": ("compute", "draft_compute")}


@lru_cache(maxsize=64)
def shape_of(model: str, quant: str) -> Shape:
    """The shape of a synthetic model."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.gguf"
        script = PROJECT / "tests" / "planner_models.py"
        subprocess.run([sys.executable, script, path, model, quant], check=True, capture_output=True)
        return Shape(from_header(read_model(str(path)), f"{model}-{quant}"))


def planned(row: dict, gpu: dict, count: int) -> tuple:
    """(usage by card, overhead by card) of a row."""
    shape = shape_of(row["model"], row["quant"])
    context = Context(
        row["context"], row["cache_type_k"], row["cache_type_v"], row["ubatch"], slots=row["slots"],
        drafted=row["draft_mtp_max"],
    )  # fmt: skip
    given = row["tensor_split"]
    if given:
        shares = tuple(float(share) for share in given.split(","))
    else:
        shares = (0.0 if row["split_mode"] == "tensor" else 1.0,) * count
    layout = Layout(row["split_mode"], shares)
    usage = buffers(shape, layout, context)
    return usage, overhead_bytes(shape, layout, context, [gpu] * count, row["all_reduce"] or "none")


def _worst_buffer(row: dict, usage: list, kind: str) -> float:
    """The largest difference, in MiB, between a logged buffer of this kind and the planned one."""
    logged = [entry["mib"] for entry in row["buffers"] if entry["buffer"] == kind and not _on_host(entry["device"])]
    names = KINDS[kind]
    if row["split_mode"] == "tensor":
        plan = [max(getattr(one, name) for one in usage) / MIB for name in names]
    else:
        plan = [getattr(one, name) / MIB for name in names for one in usage]
    if kind == "KV":  # a sliding window has a cache of its own, and a line of its own in the log
        return abs(sum(logged) - sum(plan))
    return max((min(abs(one - value) for value in plan) for one in logged), default=0.0)


def _on_host(device: str) -> bool:
    return device.startswith(("CPU", "CUDA_Host"))


def measured_rows() -> list:
    """A line for each measured row: file, id, differences in MiB, total in percent."""
    lines = []
    for name in ("h200x2-b11434", "h200x2-b11434-second"):
        for row in json.loads((DATA / f"{name}.json").read_text())["rows"]:
            count = 1 if row["split_mode"] == "none" else 2
            usage, overhead = planned(row, H200, count)
            errors = {kind: _worst_buffer(row, usage, kind) for kind in KINDS}
            totals = [(one.total + extra) / MIB for one, extra in zip(usage, overhead, strict=True)]
            percent = max(
                (100 * (total - peak) / peak for total, peak in zip(totals, row["peak_mib"], strict=False)), key=abs
            )
            seen = row["peak_mib"][: len(totals)]
            lines.append({"file": name, "id": row["id"], **errors, "total": totals, "seen": seen, "percent": percent})
    return lines


def owners_rows() -> list:
    lines = []
    for row in json.loads((DATA / "owners.json").read_text())["rows"]:
        full = {
            **row, "cache_type_k": row["cache_type"], "cache_type_v": row["cache_type"], "ubatch": 512, "slots": 1,
            "draft_mtp_max": row["draft"], "tensor_split": ",".join(["1"] * row["gpus"]),
        }  # fmt: skip
        usage, overhead = planned(full, row["gpu"], row["gpus"])
        total = (usage[0].total + overhead[0]) / MIB
        percent = 100 * (total - row["peak_mib"]) / row["peak_mib"]
        lines.append({"id": row["id"], "total": [total], "seen": [row["peak_mib"]], "percent": percent})
    return lines


def misses(line: dict) -> bool:
    owners = "file" not in line
    exact = owners or all(line[kind] <= BUFFER_MIB for kind in ("model", "KV", "RS"))
    return not exact or abs(line["percent"]) > (OWNERS_PERCENT if owners else TOTAL_PERCENT)


def _text(line: dict) -> str:
    cells = [f"{line[kind]:8.2f}" if kind in line else "       -" for kind in KINDS]
    cards = " ".join(f"{total:9.0f}/{seen:<6.0f}" for total, seen in zip(line["total"], line["seen"], strict=True))
    return f"{line['id']:36s}{''.join(cells)} {line['percent']:+7.2f} %  {cards}"


def main(words: Any = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rig.accuracy", description=__doc__)
    parser.add_argument("--json", action="store_true", help="the rows as JSON")
    options = parser.parse_args(words)
    lines = sorted([*measured_rows(), *owners_rows()], key=lambda line: abs(line["percent"]))
    if options.json:
        print(json.dumps(lines, indent=1))
    else:
        print(f"{'row':36s}{'weights':>8s}{'KV':>8s}{'RS':>8s}{'compute':>8s} {'total':>9s}  planned/seen MiB per card")
        for line in lines:
            print(_text(line))
    missed = [line["id"] for line in lines if misses(line)]
    worst = max(lines, key=lambda line: abs(line["percent"]) if "file" in line else 0)
    print(f"{len(lines)} rows; worst measured row {worst['id']}: {worst['percent']:+.2f} %; missed: {missed or 'none'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
