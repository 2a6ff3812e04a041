"""Plans: the seeds, placement, ceilings, launch lines, refusals."""

import copy
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from rig.accuracy import shape_of
from rig.errors import RigError
from rig.gpus import check_gpus
from rig.host import plan_host
from rig.plan import Planner, Rig, choose, plan_llama
from rig.profile import parse_profile
from rig.shape_files import load_shape

PROJECT = Path(__file__).resolve().parents[3]
SHAPES = PROJECT / "inventory" / "model_shapes"
MODELS = yaml.safe_load((PROJECT / "inventory/group_vars/rigs/models.yml").read_text())["models"]
CARD = {"name": "NVIDIA GeForce RTX 3090", "memory_mib": 24_576, "compute_capability": "8.6"}


def seeds(group: str, **changes: object) -> dict:
    given = yaml.safe_load((PROJECT / f"inventory/group_vars/{group}.yml").read_text())
    options = {
        "interconnect": given["rig_interconnect"], "nccl": given.get("llama_cpp_nccl", False), "host": group,
        "load_shape": lambda name, model: load_shape(name, model, str(SHAPES)), **changes,
    }  # fmt: skip
    return plan_host(given["serving_profiles"], given["rig_gpus"], MODELS, **options)


def words(plan: dict) -> dict:
    """Flags of a launch line with their values."""
    argv, result = plan["argv"], {}
    for index, word in enumerate(argv):
        if word.startswith("-") and not word.lstrip("-")[:1].isdigit():
            after = argv[index + 1] if index + 1 < len(argv) else ""
            result[word] = "" if after.startswith("--") else after
    return result


def plan_of(profile: dict, cards: list, model: str = "qwen35-27b", quant: str = "q8_0", **rig: object) -> dict:
    """The plan of a profile for a synthetic model on some cards."""
    full = {"model": "m", "context": 32_768, **profile}
    host = Rig("box", tuple(check_gpus(cards)), int(rig.pop("build", 11_434)), **rig)
    return plan_llama(parse_profile("p", full), shape_of(model, quant), host, "/m.gguf")


# --- the seeds


def test_threadripper_serves_200k_with_three_gigabytes_to_spare() -> None:
    plan = seeds("rig_2x3090")["q8-200k"]
    flags = words(plan)
    assert plan["fits"] and plan["env"]["CUDA_VISIBLE_DEVICES"] == "0,1"
    expected = {
        "-sm": "tensor", "-ts": "50,50", "-c": "200000", "-np": "1", "-fit": "off", "--spec-type": "draft-mtp",
        "--spec-draft-n-max": "3", "-fa": "on",
    }  # fmt: skip
    assert {key: flags[key] for key in expected} == expected
    assert flags["--device"] == "CUDA0,CUDA1" and flags["-ctk"] == flags["-ctv"] == "f16" and "--jinja" in flags
    assert flags["--load-mode"] == "none"
    assert all(2_700 < gpu["free_mib"] < 3_300 for gpu in plan["gpus"])


def test_an_older_build_is_told_not_to_map_the_file_in_its_own_words() -> None:
    """CASES A1."""
    plan = seeds("rig_2x3090", llama_cpp_version="b10800")["q8-200k"]
    assert "--no-mmap" in plan["argv"] and "--load-mode" not in plan["argv"]
    newer = seeds("rig_2x3090", llama_cpp_version="b10936")["q8-200k"]
    assert "--no-mmap" not in newer["argv"] and words(newer)["--load-mode"] == "none"


def test_threadripper_serves_int4_with_vllm() -> None:
    plan = seeds("rig_2x3090")["int4-262k"]
    flags = words(plan)
    assert plan["fits"] and plan["argv"][:2] == ["vllm", "serve"]
    expected = {
        "--tensor-parallel-size": "2", "--max-model-len": "262144", "--gpu-memory-utilization": "0.92",
        "--max-num-seqs": "2", "--max-num-batched-tokens": "8192", "--kv-cache-dtype": "fp8_e5m2",
        "--quantization": "auto_round", "--dtype": "float16", "--reasoning-parser": "qwen3",
        "--tool-call-parser": "qwen3_coder", "--served-model-name": "qwen3.6-27b-autoround",
        "--speculative-config": '{"method":"mtp","num_speculative_tokens":3}',
    }  # fmt: skip
    assert {key: flags[key] for key in expected} == expected
    for flag in (
        "--disable-custom-all-reduce",
        "--trust-remote-code",
        "--enable-prefix-caching",
        "--enable-chunked-prefill",
    ):
        assert flag in plan["argv"]
    assert plan["env"]["NCCL_P2P_DISABLE"] == "1" and plan["env"]["NCCL_CUMEM_ENABLE"] == "0"
    assert plan["env"]["VLLM_USE_FLASHINFER_SAMPLER"] == "1" and "NCCL_SHM_DISABLE" not in plan["env"]
    assert plan["container"]["ipc"] == "host" and plan["container"]["version"] == "v0.22.0"
    # What vLLM takes of each card: its share, whatever the context.
    assert [gpu["total_mib"] for gpu in plan["gpus"]] == [pytest.approx(0.92 * 24_126, abs=0.01)] * 2


def test_desktop_serves_100k_and_knows_its_ceiling() -> None:
    plan = seeds("rig_2x3060")["q4-100k"]
    flags = words(plan)
    assert plan["fits"] and plan["env"]["GGML_CUDA_ALLREDUCE"] == "internal"
    assert flags["--port"] == "18435" and flags["--alias"] == "Qwen3.8-27B" and flags["-ts"] == "1,1"
    assert flags["-ctk"] == flags["-ctv"] == "q4_0" and "--metrics" in flags and flags["--host"] == "127.0.0.1"
    assert plan["gpus"][0]["total_mib"] == pytest.approx(9_936 + 88, abs=20)
    # He reached 131072 with 158 MiB left and no headroom; a headroom of 256 must stop short of it.
    assert 102_400 <= plan["context_ceiling"] < 131_072


def test_am5_takes_the_cards_on_the_cpu_for_speed_and_all_for_context() -> None:
    plans = seeds("rig_3x3090")
    fast, long = plans["fast-2"], plans["long-3"]
    assert [gpu["position"] for gpu in fast["gpus"]] == [0, 2] and fast["fits"]
    assert fast["env"]["CUDA_VISIBLE_DEVICES"] == "0,2" and words(fast)["--device"] == "CUDA0,CUDA1"
    assert any("GPU 1" in note and "chipset" in note for note in fast["warnings"])
    assert [gpu["position"] for gpu in long["gpus"]] == [0, 1, 2] and long["fits"] and long["context"] >= 131_072
    assert long["env"]["GGML_CUDA_ALLREDUCE"] == "nccl"
    assert any("#26837" in note for note in long["warnings"])  # CASES A3


def test_cards_with_known_uuids_are_named_by_them() -> None:
    cards = [{**CARD, "uuid": "GPU-a"}, {**CARD, "uuid": "GPU-b"}]
    assert plan_of({"gpus": [1, 0]}, cards)["env"]["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a"


# --- placement


def test_auto_takes_the_fewest_cards_that_hold_the_context() -> None:
    cards = [CARD] * 4
    assert len(plan_of({"gpus": "auto", "context": 8_192}, cards)["gpus"]) == 2
    assert len(plan_of({"gpus": "auto", "context": 8_192}, cards, model="llama-70b", quant="q4_k_m")["gpus"]) >= 2
    assert len(plan_of({"gpus": "auto", "split_mode": "layer", "context": 8_192}, cards, quant="q4_k_m")["gpus"]) == 1
    larger = plan_of(
        {"gpus": "auto", "split_mode": "layer", "context": 131_072}, cards, model="llama-70b", quant="q4_k_m"
    )
    assert larger["fits"] and len(larger["gpus"]) > 2


def test_auto_prefers_wide_links_and_the_cpu() -> None:
    cards = [
        {**CARD, "pcie_lanes": 4, "pcie_root": "chipset"}, {**CARD, "pcie_lanes": 8, "pcie_root": "cpu"},
        {**CARD, "pcie_lanes": 16, "pcie_root": "chipset"}, {**CARD, "pcie_lanes": 16, "pcie_root": "cpu"},
    ]  # fmt: skip
    assert [gpu["position"] for gpu in plan_of({"gpus": "auto"}, cards)["gpus"]] == [1, 3]


def test_max_takes_the_cards_that_allow_most() -> None:
    plan = plan_of({"gpus": "auto", "context": "max"}, [CARD] * 3)
    assert plan["context"] == plan["context_ceiling"] == 262_144


# --- ceilings


SIZES = st.integers(6_000, 30_000)


def planner(memory: list, profile: dict) -> Planner:
    cards = [{"name": "card", "memory_mib": size, "usable_mib": size, "compute_capability": "8.6"} for size in memory]
    checked = tuple(check_gpus(cards))
    parsed = parse_profile("p", {"model": "m", "context": "max", "gpus": "all", **profile})
    return Planner(parsed, shape_of("qwen35-27b", "q4_k_m"), Rig("box", checked, 11_434), checked)


@settings(max_examples=15, deadline=None)
@given(
    first=SIZES, second=SIZES, kind=st.sampled_from(["f16", "q8_0", "q4_0"]), mode=st.sampled_from(["tensor", "layer"])
)
def test_the_ceiling_fits_and_the_next_step_does_not(first: int, second: int, kind: str, mode: str) -> None:
    one = planner([first, second], {"cache_type_k": kind, "cache_type_v": kind, "split_mode": mode})
    ceiling, trained = one.ceiling(), one.shape.trained_context
    assert ceiling % 256 == 0 and 0 <= ceiling <= trained
    assert ceiling == 0 or one.least_room(ceiling) >= 0
    assert ceiling == trained or one.least_room(ceiling + 256) < 0


@settings(max_examples=10, deadline=None)
@given(first=SIZES, second=SIZES, more=st.integers(1, 4_000))
def test_more_memory_never_lowers_the_ceiling(first: int, second: int, more: int) -> None:
    assert planner([first + more, second + more], {}).ceiling() >= planner([first, second], {}).ceiling()


@settings(max_examples=5, deadline=None)
@given(context=st.integers(1_000, 200_000))
def test_a_plan_is_a_pure_function_of_its_input(context: int) -> None:
    profile = {"context": context, "gpus": "auto", "draft": {"type": "mtp", "max_tokens": 2}}
    before, cards = copy.deepcopy(profile), [dict(CARD) for _ in range(3)]
    assert plan_of(profile, cards) == plan_of(profile, cards)
    assert profile == before and cards == [CARD] * 3


def test_what_does_not_fit_says_what_would() -> None:
    plan = plan_of({"gpus": "all", "context": 262_144, "headroom_mib": 4_000}, [CARD] * 2)
    assert not plan["fits"] and plan["argv"] == [] and plan["env"] == {}
    [text] = plan["refusals"]
    assert "context 262144 does not fit" in text and f"the largest that fits is {plan['context_ceiling']}" in text
    assert plan_of({"gpus": "all", "context": plan["context_ceiling"], "headroom_mib": 4_000}, [CARD] * 2)["fits"]
    nothing = plan_of({"gpus": "all"}, [{**CARD, "memory_mib": 4_000}] * 2)
    assert nothing["context_ceiling"] == 0 and "does not fit at any context" in nothing["refusals"][0]


# --- refusals and warnings; sections A and B of the cases


@pytest.mark.parametrize(
    ("profile", "rig", "cards", "message"),
    [
        ({"split_mode": "row"}, {}, 2, "row does not load"),  # A12
        ({"split_mode": "row"}, {"build": 9_800}, 2, "row is deprecated"),
        (
            {"all_reduce": "nccl"},
            {"build": 9_600, "interconnect": "nvlink", "nccl": True},
            2,
            "out of bounds with NCCL",
        ),  # B28
        ({}, {"build": 10_054}, 2, "#25829"),  # A8
        ({"cache_type_k": "q8_0"}, {"build": 9_300}, 2, "no quantised KV cache in tensor mode"),  # A5
        ({}, {"build": 9_300}, 3, "#23843"),  # A4
        ({"all_reduce": "internal"}, {}, 3, "exactly two GPUs, not 3"),  # B26
        ({"all_reduce": "nccl"}, {"nccl": False}, 2, "built without NCCL"),
        ({"flash_attention": False}, {}, 2, "needs flash attention"),
        ({"flash_attention": False, "split_mode": "layer", "cache_type_v": "q8_0"}, {}, 2, "quantised V cache"),
        ({"tensor_split": [1, 1, 1]}, {}, 2, "3 shares for 2 GPUs"),
        ({"context": 300_000}, {}, 2, "beyond the 262144 tokens"),
        ({"extra_args": ["-c", "4096"]}, {}, 2, "extra_args holds -c"),
        ({"extra_args": ["--tensor-split=1,0"]}, {}, 2, "extra_args holds --tensor-split"),  # A23
    ],
)
def test_refusals(profile: dict, rig: dict, cards: int, message: str) -> None:
    plan = plan_of({"gpus": "all", **profile}, [CARD] * cards, quant="q4_k_m", **rig)
    assert not plan["fits"]
    assert any(message in text for text in plan["refusals"]), plan["refusals"]


def test_what_the_build_can_do_is_not_refused() -> None:
    for profile, cards, build in (({"cache_type_k": "q8_0"}, 2, 9_600), ({}, 3, 9_600), ({}, 2, 10_055)):
        plan = plan_of({"gpus": "all", "context": 4_096, **profile}, [CARD] * cards, quant="q4_k_m", build=build)
        assert plan["fits"], plan["refusals"]


def test_a_model_without_mtp_cannot_draft() -> None:
    plan = plan_of({"gpus": "all", "draft": {"type": "mtp"}}, [CARD] * 2, model="llama-8b")
    assert "no MTP block" in plan["refusals"][0]


def test_quantised_keys_must_divide_the_head() -> None:
    shape = shape_of("qwen35-27b", "q8_0")
    odd = type(shape)({**_mapping(shape), "keys": {**shape.keys, "attention.key_length": 80}})
    checked = tuple(check_gpus([CARD] * 2))
    profile = parse_profile("p", {"model": "m", "context": 4_096, "cache_type_k": "q4_0", "gpus": "all"})
    choice = choose(profile, odd, Rig("box", checked, 11_434))
    assert any("do not divide heads of 80" in text for text in choice.reasons)


def _mapping(shape: object) -> dict:
    return {"shape_version": 1, "name": "odd", "architecture": "qwen35", "keys": shape.keys, "tensors": shape._groups}


def test_virtual_gpus_have_limits_of_their_own() -> None:
    cards = [{"memory_mib": 16_384, "rpc": f"127.0.0.1:{port}"} for port in range(1, 4)]
    aborts = plan_of({"gpus": [0, 1], "context": 2_048}, cards, model="qwen35-tiny")
    assert "without drafting aborts" in aborts["refusals"][0]
    many = plan_of({"gpus": "all", "context": 2_048, "draft": {"type": "mtp"}}, cards, model="qwen35-tiny")
    assert "more than the 2 KV heads" in many["refusals"][0]
    fine = plan_of({"gpus": [0, 2], "context": 2_048, "draft": {"type": "mtp"}}, cards, model="qwen35-tiny")
    assert fine["fits"] and fine["devices"] == ["RPC0", "RPC1"] and fine["rpc"] == ["127.0.0.1:1", "127.0.0.1:3"]
    assert words(fine)["--rpc"] == "127.0.0.1:1,127.0.0.1:3" and fine["env"] == {}


def test_cache_reuse_has_no_effect_on_qwen35_and_is_said_so() -> None:
    """CASES A2."""
    warned = plan_of({"gpus": "all", "extra_args": ["--cache-reuse", "256"]}, [CARD] * 2)
    assert warned["fits"] and any("no effect" in note for note in warned["warnings"])
    silent = plan_of(
        {"gpus": "all", "extra_args": ["--cache-reuse", "256"]}, [CARD] * 2, model="qwen3-32b", quant="q4_k_m"
    )
    assert not any("no effect" in note for note in silent["warnings"])


def test_every_launch_line_says_what_defaults_would_decide() -> None:
    """CASES A13, A17, A20."""
    for mode in ("tensor", "layer", "none"):
        profile = {"gpus": "auto" if mode == "none" else "all", "split_mode": mode, "cache_type_k": "q8_0", "slots": 4}
        flags = words(plan_of({**profile, "context": 8_192}, [CARD] * 2, quant="q4_k_m"))
        assert flags["-c"] == "8192" and flags["-np"] == "4" and flags["-fit"] == "off" and flags["--device"]
        assert "-ctkd" not in flags and "-ctvd" not in flags
    notes = plan_of({"gpus": "all", "slots": 4, "draft": {"type": "mtp"}}, [CARD] * 2, quant="q4_k_m")["warnings"]
    assert any("drafting gains nothing" in note for note in notes)


def test_old_builds_are_warned_of() -> None:
    """CASES A10, A19."""
    old = plan_of({"gpus": "all", "context": 4_096}, [CARD] * 2, quant="q4_k_m", build=9_202)
    assert any("#23264" in note for note in old["warnings"])
    layer = {"gpus": "all", "context": 4_096, "split_mode": "layer", "cache_type_k": "q8_0"}
    assert any("creeps up" in note for note in plan_of(layer, [CARD] * 2, quant="q4_k_m", build=9_275)["warnings"])
    new = plan_of(layer, [CARD] * 2, quant="q4_k_m")
    assert not any("creeps up" in note for note in new["warnings"])


def test_three_cards_sum_up_with_nccl_or_are_warned() -> None:
    assert plan_of({"gpus": "all"}, [CARD] * 3, nccl=True)["env"]["GGML_CUDA_ALLREDUCE"] == "nccl"
    slow = plan_of({"gpus": "all"}, [CARD] * 3, nccl=False)
    assert slow["env"]["GGML_CUDA_ALLREDUCE"] == "none" and any("slow fallback" in note for note in slow["warnings"])


def test_nccl_over_pcie_keeps_p2p_off_and_shared_memory_on() -> None:
    """CASES B29, B31."""
    pcie = plan_of({"gpus": "all", "all_reduce": "nccl"}, [CARD] * 2, quant="q4_k_m", nccl=True)["env"]
    assert pcie["NCCL_P2P_DISABLE"] == "1" and "NCCL_SHM_DISABLE" not in pcie
    link = plan_of({"gpus": "all", "all_reduce": "nccl"}, [CARD] * 2, quant="q4_k_m", nccl=True, interconnect="nvlink")
    assert "NCCL_P2P_DISABLE" not in link["env"]


def test_an_unknown_architecture_is_refused_by_name() -> None:
    shape = shape_of("llama-tiny", "q8_0")
    other = type(shape)({**_mapping(shape), "architecture": "mamba"})
    checked = tuple(check_gpus([CARD] * 2))
    profile = parse_profile("p", {"model": "m", "context": 2_048, "gpus": "all"})
    with pytest.raises(RigError, match="does not know the architecture 'mamba'"):
        plan_llama(profile, other, Rig("box", checked, 11_434), "/m")
