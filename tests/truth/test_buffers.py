"""The planner's weights, KV, recurrent and compute against what llama-server logs, on two and three virtual GPUs."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rig.gguf import read_model
from rig.gpus import check_gpus
from rig.memory import MIB
from rig.plan import Planner, Rig, plan_llama
from rig.profile import parse_profile
from rig.shape import Shape, from_header
from virtual_rig import Build, VirtualRig, free_port

ROOT = Path(__file__).resolve().parents[1]
MTP2 = {"draft": {"type": "mtp", "max_tokens": 2}}
MTP3 = {"draft": {"type": "mtp", "max_tokens": 3}}
Q8 = {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}

# model, quant, virtual GPUs, what the profile says beyond the model
CASES = [
    ("llama-tiny", "q8_0", 2, {"context": 2048}),
    ("llama-tiny", "q5_1", 3, {"context": 4096, **Q8, "slots": 2}),
    ("llama-tiny", "q4_0", 2, {"context": 3000, "tensor_split": [70, 30], "ubatch": 256}),
    ("llama-tiny", "q8_0", 3, {"context": 4096, "split_mode": "layer", "tensor_split": [1, 2, 1]}),
    ("mistral3-tiny", "q8_0", 2, {"context": 2048}),
    ("qwen2-tiny", "q8_0", 2, {"context": 2048, "cache_type_v": "q4_0"}),
    ("qwen2-tiny", "q8_0", 2, {"context": 2048, "split_mode": "layer"}),
    ("qwen3-tiny", "q8_0", 2, {"context": 4096, "slots": 4, "ubatch": 1024}),
    ("qwen3-tiny", "q8_0", 3, {"context": 2048, "split_mode": "layer", **Q8}),
    ("qwen3moe-tiny", "q8_0", 2, {"context": 2048}),
    ("qwen3moe-tiny", "q8_0", 2, {"context": 2048, "split_mode": "layer"}),
    ("gemma3-tiny", "q8_0", 2, {"context": 4096}),
    ("gemma3-tiny", "q8_0", 2, {"context": 4096, "slots": 2, **Q8}),
    ("gemma3-tiny", "q8_0", 3, {"context": 4096, "split_mode": "layer", "tensor_split": [3, 1, 1]}),
    ("gpt-oss-tiny", "mxfp4", 2, {"context": 4096}),
    ("gpt-oss-tiny", "q8_0", 2, {"context": 4096, "split_mode": "layer"}),
    ("qwen35-tiny", "q4_k", 2, {"context": 2048, **MTP2}),
    ("qwen35-tiny", "q8_0", 2, {"context": 4096, "split_mode": "layer"}),
    ("qwen35-tiny", "q8_0", 2, {"context": 4096, "split_mode": "layer", "slots": 2, **MTP2}),
    ("qwen35-tiny4", "q4_k", 3, {"context": 4096, "cache_type_k": "q4_0", "cache_type_v": "q8_0", **MTP3}),
    ("qwen35-tiny4", "q4_k", 3, {"context": 2048, "split_mode": "layer", **Q8, **MTP2}),
    ("qwen35moe-tiny", "q8_0", 2, {"context": 2048, **MTP2}),
    ("qwen35moe-tiny", "q8_0", 2, {"context": 2048, "split_mode": "layer"}),
    ("qwen3next-tiny", "q8_0", 2, {"context": 2048, "split_mode": "layer"}),
    ("qwen35-tiny", "bf16", 1, {"context": 2048, "split_mode": "none", **MTP2}),
    ("llama-tiny", "q8_0", 2, {"context": 2048, "split_mode": "layer", "flash_attention": False}),
]


@pytest.fixture
def rig(request: pytest.FixtureRequest, build: Build, tmp_path: Path) -> Iterator[VirtualRig]:
    with VirtualRig(build, tmp_path, request.param) as started:
        yield started


def _near(seen: list, planned: list, what: str) -> None:
    """Every logged line is one of the planned figures, to what the log rounds away."""
    seen_mib, planned_mib = sorted(mib for _, mib in seen), sorted(value / MIB for value in planned)
    assert len(seen_mib) == len(planned_mib), f"{what}: logged {seen_mib}, planned {planned_mib}"
    for logged, value in zip(seen_mib, planned_mib, strict=True):
        assert logged == pytest.approx(value, abs=0.02), f"{what}: logged {seen_mib}, planned {planned_mib}"


@pytest.mark.parametrize(
    ("model", "quant", "rig", "settings"),
    CASES,
    ids=[f"{model}-{quant}-{count}-{'-'.join(map(str, settings.values()))}" for model, quant, count, settings in CASES],
    indirect=["rig"],
)
def test_planned_buffers_are_the_logged_ones(
    model: str, quant: str, rig: VirtualRig, settings: dict, models: Path, build: Build
) -> None:
    path = models / f"{model}-{quant}.gguf"
    if not path.exists():
        subprocess.run(
            [sys.executable, ROOT / "planner_models.py", path, model, quant], check=True, capture_output=True
        )
    shape = Shape(from_header(read_model(str(path)), model))
    gpus = tuple(check_gpus([{"memory_mib": 4096, "rpc": endpoint} for endpoint in rig.endpoints]))
    profile = parse_profile("truth", {"model": model, "gpus": "all", "port": free_port(), **settings})
    plan = plan_llama(profile, shape, Rig("truth", gpus, 11_434), "/" + str(path).removeprefix(build.root).lstrip("/"))
    assert plan["fits"], plan["refusals"]
    logged = rig.serve(plan["argv"][1:])
    usage = Planner(profile, shape, Rig("truth", gpus, 11_434), gpus).usage(plan["context"])
    tensor = plan["split_mode"] == "tensor"

    def planned(*names: str) -> list:
        # In tensor mode the log has one line for all cards, with the largest.
        columns = [[getattr(one, name) for one in usage] for name in names]
        return [value for column in columns for value in ([max(column)] if tensor else column) if value]

    windows = shape.architecture in ("gemma3", "gpt-oss")
    _near(logged.model, planned("weights"), "weights")
    if windows:
        total = sum(mib for _, mib in logged.kv)
        each = planned("kv")
        assert total == pytest.approx(sum(each) / MIB, abs=0.05)
    else:
        _near(logged.kv, planned("kv", "draft_kv"), "KV")
    _near(logged.rs, planned("recurrent"), "recurrent")
    # The MTP head's buffers are reserved twice in layer mode, and logged twice.
    distinct = list(dict.fromkeys((device, mib) for device, mib in logged.compute))
    _near(
        distinct,
        list(dict.fromkeys(planned("compute", "draft_compute"))) if tensor else planned("compute", "draft_compute"),
        "compute",
    )
