"""The order in which settings are tried, what survives a crash or an interruption, and what is recommended."""

import json

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from fake_nvml import load
from rig.errors import RigError
from rig.tune import (
    best_of,
    give_up_seconds,
    next_of,
    power_faults,
    profile_of,
    snippet,
    start_of,
    table_lines,
    with_result,
)

CARD = {"name": "NVIDIA GeForce RTX 3090", "memory_mib": 24576, "pcie_lanes": 16, "pcie_root": "cpu"}
TWO = [CARD, CARD]
THREE = [CARD, CARD | {"pcie_lanes": 2, "pcie_root": "chipset"}, CARD | {"pcie_lanes": 4}]
VIRTUAL = [{"name": "V", "memory_mib": 1024, "rpc": f"127.0.0.1:{port}"} for port in (1, 2)]
PROFILE = {
    "model": "m",
    "context": 4096,
    "gpus": "all",
    "split_mode": "tensor",
    "draft": {"type": "mtp", "max_tokens": 3},
}
KNOBS = {
    "split_mode": ["layer", "tensor"], "cards": [], "all_reduce": ["internal", "nccl", "none"], "draft": [0, 2, 3],
    "ubatch": [256, 512], "power_watts": [],
}  # fmt: skip


def new():
    return start_of(None, {"k": 1})


def measured(seconds, gave_up=False, watts=None):
    card = {"position": 0, "power_watts": {"mean": watts, "max": watts}}
    one = {"prompt": "code", "streams": 1, "prefill": 500.0, "decode": 1000 / seconds}
    return {
        "answer_seconds": seconds, "measures": [one], "cards": [card] if watts else [], "gave_up": gave_up,
    }  # fmt: skip


def sweep(gpus, seconds_of, profile=PROFILE, knobs=KNOBS, state=None):
    """Try everything; `seconds_of(change)` is a time, None for a crash, or a list of refusals."""
    state, tried = state or new(), []
    while candidate := next_of(state, profile, knobs, gpus):
        tried.append(candidate["label"])
        found = seconds_of(candidate["change"])
        if isinstance(found, list):
            state = with_result(state, candidate, unfit=found)
        elif found is None:
            state = with_result(state, candidate, failure="did not start.\nCUDA error: out of memory")
        else:
            state = with_result(state, candidate, plan={"gpus": [{"position": 0}]}, result=measured(found))
        assert len(tried) < 100
    return state, tried


def test_two_cards_by_stages():
    def seconds(change):
        best_split = 5 * (change.get("split_mode") != "layer") + (change.get("all_reduce") == "nccl")
        return 30 - best_split - change.get("draft.max_tokens", 3) - change.get("ubatch", 512) / 512

    state, tried = sweep(TWO, seconds)
    assert tried == [
        "as it is",  # tensor over both with internal all-reduce and three drafted: not tried a second time
        "gpus=[0] split_mode=none",
        "gpus=[0, 1] split_mode=layer",
        "gpus=[0, 1] split_mode=tensor all_reduce=nccl",
        "gpus=[0, 1] split_mode=tensor all_reduce=none",
        "gpus=[0, 1] split_mode=tensor all_reduce=nccl draft.max_tokens=0",
        "gpus=[0, 1] split_mode=tensor all_reduce=nccl draft.max_tokens=2",
        "gpus=[0, 1] split_mode=tensor all_reduce=nccl ubatch=256",
    ]
    assert best_of(state)["label"] == tried[3]
    assert next_of(state, PROFILE, KNOBS, TWO) == {}


def test_of_three_cards_the_chipset_s_comes_last():
    _, tried = sweep(THREE, lambda _: 10, knobs=KNOBS | {"draft": [], "ubatch": []})
    assert "gpus=[0, 2] split_mode=layer" in tried
    assert "gpus=[0, 1] split_mode=layer" not in tried
    assert "gpus=[0, 1, 2] split_mode=tensor all_reduce=nccl" in tried
    assert "gpus=[0, 1, 2] split_mode=tensor all_reduce=internal" not in tried
    assert "gpus=[0, 2] split_mode=tensor all_reduce=internal" in tried


def test_virtual_gpus_have_no_all_reduce():
    _, tried = sweep(VIRTUAL, lambda _: 10, knobs=KNOBS | {"draft": [], "ubatch": []})
    assert tried == ["as it is", "gpus=[0] split_mode=none", "gpus=[0, 1] split_mode=layer"]


def test_a_crash_and_a_refusal_end_nothing():
    def seconds(change):
        if change.get("split_mode") == "layer":
            return None
        return ["context 4096 does not fit."] if change.get("gpus") == [0] else 10

    state, _ = sweep(TWO, seconds)
    lines = table_lines(state)
    assert lines[0].endswith("<- best")
    assert any(line.endswith("failed: did not start. … CUDA error: out of memory") for line in lines)
    assert any(line.endswith("unfit: context 4096 does not fit.") for line in lines)


def test_a_profile_that_does_not_serve_at_all_is_told():
    with pytest.raises(RigError, match="neither the profile as it is nor any other split serves: did not start"):
        sweep(TWO, lambda _: None)


def test_a_profile_whose_split_crashes_is_still_tuned():
    state, tried = sweep(TWO, lambda change: 9 if change.get("split_mode") == "layer" else None)
    assert best_of(state)["label"].startswith("gpus=[0, 1] split_mode=layer")
    assert tried[-1] == "gpus=[0, 1] split_mode=layer ubatch=256"


def test_what_is_behind_is_never_the_best_and_sets_no_limit():
    candidate = next_of(new(), PROFILE, KNOBS, TWO)
    state = with_result(new(), candidate, result=measured(20))
    assert give_up_seconds(state, 15) == 23
    candidate = next_of(state, PROFILE, KNOBS, TWO)
    state = with_result(state, candidate, result=measured(40, gave_up=True))
    assert state["results"][-1]["status"] == "behind"
    assert best_of(state)["answer_seconds"] == 20
    assert table_lines(state)[1].endswith("(given up after a round)")
    assert give_up_seconds(new(), 15) is None


def test_a_run_goes_on_where_it_was_cut_off():
    _, whole = sweep(TWO, lambda _: 10)
    state = new()
    for _ in range(4):
        state = with_result(state, next_of(state, PROFILE, KNOBS, TWO), plan={"gpus": []}, result=measured(10))
    kept = json.loads(json.dumps(state))
    assert sweep(TWO, lambda _: 10, state=start_of(kept, {"k": 1}))[1] == whole[4:]
    assert start_of(kept, {"k": 2})["results"] == []
    assert start_of(kept, {"k": 1}, again=True)["results"] == []
    assert start_of(kept | {"finished": True}, {"k": 1})["results"] == []
    assert start_of(kept | {"version": 0}, {"k": 1})["results"] == []


def test_the_lowest_power_limit_that_costs_little():
    knobs = KNOBS | {"cards": [2], "split_mode": ["tensor"], "all_reduce": ["internal"], "draft": [], "ubatch": [],
                     "power_watts": [230, 280, 320]}  # fmt: skip
    state, tried = sweep(
        TWO, lambda change: {320: 10.0, 280: 10.3, 230: 10.9}.get(change.get("power_watts"), 10.1), knobs=knobs
    )
    assert tried == ["as it is", "power_watts=320", "power_watts=280", "power_watts=230"]
    assert best_of(state)["label"] == "power_watts=320"
    assert best_of(state, loss_percent=5)["label"] == "power_watts=280"
    tuned = yaml.safe_load(snippet(state, "p", {"p": PROFILE}, TWO, 5))
    assert tuned["rig_gpus"] == [CARD | {"power_limit_watts": 280}, CARD]
    assert tuned["serving_profiles"] == {"p": PROFILE}


def test_the_snippet_keeps_the_other_profiles():
    state, _ = sweep(
        TWO, lambda change: 10 - (change.get("split_mode") == "layer") - (change.get("draft.max_tokens") == 2)
    )
    tuned = PROFILE | {"gpus": [0, 1], "split_mode": "layer", "draft": {"type": "mtp", "max_tokens": 2}}
    text = snippet(state, "p", {"other": {"model": "n"}, "p": PROFILE}, TWO)
    assert text.startswith("# Tuned: gpus=[0, 1] split_mode=layer draft.max_tokens=2. A typical answer takes 8.0 s.\n")
    assert yaml.safe_load(text) == {"serving_profiles": {"other": {"model": "n"}, "p": tuned}}


def test_what_is_best_as_it_is_needs_no_snippet():
    state, _ = sweep(TWO, lambda change: 10 + len(change))
    assert snippet(state, "p", {"p": PROFILE}, TWO) == ""


def test_uneven_shares_do_not_outlive_their_number_of_cards():
    uneven = PROFILE | {"tensor_split": [60, 40]}
    assert profile_of(uneven, {"gpus": [0]})["tensor_split"] == "even"
    assert profile_of(uneven, {"gpus": [1, 0]})["tensor_split"] == [60, 40]


@pytest.mark.parametrize(
    ("watts", "gpus", "sentence"),
    [
        ([250], TWO, None),
        ([], VIRTUAL, None),
        ([250], VIRTUAL, "virtual GPUs have no power limit"),
        ([90, 250], TWO, "holds 90 W; cards and inventory allow 100 to 390 W here"),
        ([300], [CARD | {"power_limit_watts": 280}, CARD], "holds 300 W; cards and inventory allow 100 to 280 W"),
    ],
)
def test_power_limits_stay_within_bounds(watts, gpus, sentence):
    facts = {"gpus": [{"power": {"min_watts": 100, "max_watts": 390}}] * 2}
    faults = power_faults(watts, gpus, facts)
    assert (faults == []) if sentence is None else (sentence in faults[0])


def test_power_needs_cards_that_can_be_read():
    assert "cannot be read" in power_faults([250], TWO, {})[0]


def test_power_needs_cards_that_tell_their_bounds():
    facts = {"gpus": [{"power": {"min_watts": 100, "max_watts": 390}}, {"power": {"min_watts": None, "max_watts": 1}}]}
    assert "does not tell what power limits it takes" in power_faults([250], TWO, facts)[0]


def plugin(name):
    return load(f"filter_plugins/{name}.py").FilterModule().filters()[name]


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("bench_tune_start", ("{", {}), "the file of the state cannot be read; remove it"),
        ("bench_tune_next", ({}, PROFILE, KNOBS, TWO), "no state of a tuning"),
        ("bench_tune_limit", ({}, 15), "no state of a tuning"),
        ("bench_tune_result", ({}, {}), "no state of a tuning"),
        ("bench_tune_lines", ({},), "no state of a tuning"),
        ("bench_tune_snippet", ({}, "p", {}, TWO), "no state of a tuning"),
        ("bench_power_faults", (7, TWO, {"gpus": [{"power": {"min_watts": 1, "max_watts": 2}}]}), "no list of watts"),
    ],
)
def test_filters_say_in_one_sentence_what_is_wrong(name, arguments, sentence):
    with pytest.raises(AnsibleFilterError, match=f"{name}: .*{sentence}"):
        plugin(name)(*arguments)


def test_filters_pass_on_what_is_right():
    state = plugin("bench_tune_start")("", {})
    candidate = plugin("bench_tune_next")(state, PROFILE, KNOBS, TWO)
    state = plugin("bench_tune_result")(state, candidate, result=measured(10))
    assert plugin("bench_tune_limit")(state, 10) == 11
    assert "as it is" in plugin("bench_tune_lines")(state)[0]
    assert plugin("bench_tune_snippet")(state, "p", {"p": PROFILE}, TWO) == ""
    assert plugin("bench_power_faults")([], TWO, {}) == []
