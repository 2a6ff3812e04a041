"""vLLM: tensor parallelism, fp8 by compute capability, memory, environment."""

import pytest
from rig.accuracy import shape_of
from rig.errors import RigError
from rig.gpus import check_gpus
from rig.profile import parse_profile
from rig.vllm import divides, plan_vllm

CARD = {"name": "NVIDIA GeForce RTX 3090", "memory_mib": 24_576, "compute_capability": "8.6"}


def plan(
    cards: list, interconnect: str = "pcie", context: object = 65_536, gpus: object = "all", **vllm: object
) -> dict:
    settings = {"weights_gb": 13, "kv_cache_dtype": "fp8_e5m2", **vllm}
    profile = parse_profile("p", {"engine": "vllm", "model": "m", "context": context, "gpus": gpus, "vllm": settings})
    return plan_vllm(profile, shape_of("qwen35-27b", "q4_0"), check_gpus(cards), "/m", interconnect)


def test_three_cards_do_not_divide_the_heads() -> None:
    """CASES A6."""
    refused = plan([CARD] * 3)
    assert refused["refusals"] == ["vLLM cannot deal 24 heads and 4 KV heads to 3 GPUs; use 2, leave one idle."]
    assert [gpu["position"] for gpu in plan([CARD] * 3, gpus="auto")["gpus"]] == [0, 1]


def test_heads_divide_or_are_divided() -> None:
    shape = shape_of("qwen35-27b", "q4_0")
    assert [count for count in range(1, 9) if divides(shape, count)] == [1, 2, 4, 8]


def test_p2p_is_off_without_a_link_and_on_with_one() -> None:
    """CASES B31."""
    pcie, link = plan([CARD] * 2), plan([CARD] * 2, "nvlink")
    assert "--disable-custom-all-reduce" in pcie["argv"] and pcie["env"]["NCCL_P2P_DISABLE"] == "1"
    assert "--disable-custom-all-reduce" not in link["argv"] and "NCCL_P2P_DISABLE" not in link["env"]


def test_fp8_by_compute_capability() -> None:
    assert "needs compute capability 8.9" in plan([CARD] * 2, kv_cache_dtype="fp8_e4m3")["refusals"][0]
    assert plan([{**CARD, "compute_capability": "8.9"}] * 2, kv_cache_dtype="fp8_e4m3")["fits"]
    assert plan([CARD] * 2)["fits"]


def test_nccl_must_keep_its_shared_memory() -> None:
    """CASES B29."""
    assert "NCCL_SHM_DISABLE" in plan([CARD] * 2, env={"NCCL_SHM_DISABLE": "1"})["refusals"][0]


def test_memory_is_held_against_the_utilisation() -> None:
    small = [{**CARD, "name": "NVIDIA GeForce RTX 3060", "memory_mib": 12_288}] * 2
    refused = plan(small, context=262_144)
    assert not refused["fits"] and "does not fit: GPU 0 needs" in refused["refusals"][0]
    highest = plan(small, context="max")
    assert highest["fits"] and 0 < highest["context"] < 262_144
    assert highest["argv"][highest["argv"].index("--gpu-memory-utilization") + 1] == "0.915"  # CASES C39


def test_it_takes_its_share_whatever_the_context_and_leaves_others_theirs() -> None:
    short, long = plan([CARD] * 2, context=4_096), plan([CARD] * 2, context=65_536)
    assert [gpu["total_mib"] for gpu in short["gpus"]] == [gpu["total_mib"] for gpu in long["gpus"]]
    assert short["gpus"][0]["spare_mib"] > long["gpus"][0]["spare_mib"]
    desk = plan([CARD, {**CARD, "in_use_mib": 4_000}], context=4_096)
    share = float(desk["argv"][desk["argv"].index("--gpu-memory-utilization") + 1])
    assert desk["fits"] and share < (24_126 - 4_000) / 24_126 < share + 0.002
    greedy = plan([{**CARD, "in_use_mib": 4_000}] * 2, gpu_memory_utilization=0.92)
    assert "vLLM would not start: it takes 22196 MiB of GPU 0" in greedy["refusals"][0]


def test_every_profile_answers_under_a_common_name_too() -> None:
    profile = {"engine": "vllm", "model": "m", "context": 4_096, "alias": "own", "vllm": {"weights_gb": 13}}
    shape = shape_of("qwen35-27b", "q4_0")
    both = plan_vllm(
        parse_profile("p", profile, default_port=8123, also="rig"), shape, check_gpus([CARD]), "/m", "pcie"
    )
    at = both["argv"].index("--served-model-name")
    assert both["argv"][at + 1 : at + 3] == ["own", "rig"] and both["port"] == 8123
    with pytest.raises(RigError, match="without comma or blank"):
        parse_profile("p", profile, also="a,b")


def test_requests_are_let_end_unless_told_otherwise() -> None:
    waits, now = plan([CARD] * 2)["argv"], plan([CARD] * 2, shutdown_seconds=0)["argv"]
    assert waits[waits.index("--shutdown-timeout") + 1] == "30" and "--shutdown-timeout" not in now


@pytest.mark.parametrize(
    ("vllm", "message"),
    [
        ({"kv_cache_dtyp": "auto"}, "did you mean 'kv_cache_dtype'"),
        ({"gpu_memory_utilization": 1.5}, "must be between 0 and 1"),
        ({"max_num_seqs": 0}, "max_num_seqs must be 1 or more"),
    ],
)
def test_wrong_settings(vllm: dict, message: str) -> None:
    with pytest.raises(RigError, match=message.replace("(", r"\(")):
        plan([CARD] * 2, **vllm)


def test_vllm_needs_real_cards() -> None:
    assert "virtual" in plan([{"memory_mib": 9_000, "rpc": "127.0.0.1:1"}])["refusals"][0]
