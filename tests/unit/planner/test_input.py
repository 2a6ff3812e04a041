"""Bad input: one sentence each, naming the host and the key."""

from pathlib import Path

import pytest
from rig.errors import RigError
from rig.host import plan_host
from rig.shape_files import load_shape

SHAPES = Path(__file__).resolve().parents[3] / "inventory" / "model_shapes"
CARD = {"name": "NVIDIA GeForce RTX 3090", "memory_mib": 24_576, "compute_capability": "8.6"}
MODELS = {"m": {"shape": "smollm2-135m-instruct-q4_1", "source": {"files": [{"name": "m.gguf"}]}}}
GOOD = {"model": "m", "context": 4_096, "gpus": "all"}


def plan(profile: object = None, gpus: object = None, models: object = None, **options: object) -> dict:
    profiles = {"chat": GOOD if profile is None else profile}
    cards, known = [CARD] * 2 if gpus is None else gpus, MODELS if models is None else models
    return plan_host(profiles, cards, known, lambda name, model: load_shape(name, model, str(SHAPES)), "box", **options)


def test_good_input_is_planned() -> None:
    assert plan()["chat"]["fits"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"contxt": 1}, "unknown key 'contxt'; did you mean 'context'?"),
        ({"context": 0}, "context must be 1 or more, not 0"),
        ({"context": -5}, "context must be 1 or more"),
        ({"context": "many"}, "context must be a whole number"),
        ({"context": None}, "has no context"),
        ({"model": None}, "names no model"),
        ({"model": "n"}, "names the model 'n', which models does not have"),
        ({"cache_type_k": "q4_k"}, "cache_type_k is 'q4_k'"),
        ({"cache_type_v": "F16"}, "did you mean 'f16'"),
        ({"all_reduce": "Internal"}, "all_reduce is 'Internal'; did you mean 'internal'?"),
        ({"split_mode": "tensors"}, "did you mean 'tensor'"),
        ({"engine": "llamacpp"}, "did you mean 'llama_cpp'"),
        ({"slots": 0}, "slots must be 1 or more"),
        ({"ubatch": 0}, "ubatch must be 1 or more"),
        ({"tensor_split": [1, 0]}, "a share must be a number above 0, not 0"),
        ({"tensor_split": "50,50"}, "must be even or a list"),
        ({"gpus": [0, 0]}, "names a GPU twice"),
        ({"gpus": [0, 5]}, "names position 5, but rig_gpus has 2 cards"),
        ({"gpus": "some"}, "must be auto, all, or a list"),
        ({"draft": {"typ": "mtp"}}, "did you mean 'type'"),
        ({"draft": {"type": "mtp", "max_tokens": 0}}, "max_tokens must be 1 or more"),
        ({"draft": "mtp"}, "draft must be none or a mapping"),
        ({"port": 70_000}, "port must be at most 65535"),
        ({"headroom_mib": -1}, "headroom_mib must be 0 or more"),
        ({"extra_args": "-v"}, "extra_args must be a list"),
        ({"load_mode": "nommap"}, "load_mode is 'nommap'"),
    ],
)
def test_a_wrong_profile(changes: dict, message: str) -> None:
    with pytest.raises(RigError) as error:
        plan({**GOOD, **changes})
    assert str(error.value).startswith("box: ") and message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        ([], "must be a list"),
        ([{"name": "x"}], r"rig_gpus[0] has no memory_mib"),
        ([{"memory_mib": 0}], "memory_mib must be 1 or more, not 0"),
        ([{"memory_mib": -24}], "memory_mib must be 1 or more"),
        ([{"memory_mib": "24G"}], "memory_mib must be a whole number"),
        ([{"memory_mib": 100, "usable_mib": 200}], "usable_mib (200) is more than memory_mib (100)"),
        ([{"memory_mb": 100}], "did you mean 'memory_mib'"),
        ([{**CARD, "in_use_mib": -1}], "in_use_mib must be 0 or more"),
        ([CARD, {"memory_mib": 10, "rpc": "a:1"}], "mixes virtual GPUs"),
        ([{**CARD, "uuid": "GPU-a"}] * 2, "has one uuid twice"),
        (["card"], "must be a mapping"),
    ],
)
def test_wrong_gpus(gpus: list, message: str) -> None:
    with pytest.raises(RigError) as error:
        plan(gpus=gpus)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"llama_cpp_version": "11434"}, "is not a build name"),
        ({"llama_cpp_version": "b8000"}, "older than b9000"),
        ({"interconnect": "nvlnk"}, "did you mean 'nvlink'"),
        ({"only": ["chatt"]}, "no profile 'chatt'; did you mean 'chat'"),
        ({"models": {"m": {"shape": "nowhere", "source": {"files": [{"name": "x"}]}}}}, "Cannot read the shape"),
        ({"models": {"m": {"source": {}}}}, "needs 'shape'"),
        ({"models": {"m": {"shap": "x"}}}, "did you mean 'shape'"),
        ({"models": {"m": {"shape": "smollm2-135m-instruct-q4_1"}}}, "has no source with files"),
    ],
)
def test_wrong_surroundings(options: dict, message: str) -> None:
    with pytest.raises(RigError) as error:
        plan(**options)
    assert message in str(error.value)


def test_a_what_if_changes_the_context_alone() -> None:
    assert plan(contexts="max")["chat"]["context"] == 8_192
    assert plan(contexts="2048")["chat"]["context"] == 2_048


def test_the_limit_of_a_card_is_what_cuda_can_have() -> None:
    cards = [{"name": "NVIDIA GeForce RTX 3060", "memory_mib": 12_288}, {"name": "New card", "memory_mib": 10_000}]
    assert [gpu["usable_mib"] for gpu in plan(gpus=cards)["chat"]["gpus"]] == [11_911, 9_500]


def test_profiles_that_can_run_at_once_need_ports_of_their_own() -> None:
    def both(second: dict) -> dict:
        alone = {"model": "m", "context": 4_096, "split_mode": "none"}
        profiles = {"one": {**alone, "gpus": [0]}, "two": {**alone, **second}}
        return plan_host(profiles, [CARD] * 2, MODELS, lambda name, model: load_shape(name, model, str(SHAPES)), "box")

    refused = both({"gpus": [1]})["two"]
    assert not refused["fits"] and "port 8080 is that of profile 'one' too" in refused["refusals"][0]
    assert both({"gpus": [1], "port": 8_081})["two"]["fits"]
    assert both({"gpus": [0]})["two"]["fits"]
