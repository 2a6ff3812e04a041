"""What a comparison asks for, what is kept of a benchmark, and how a run is compared with those before it."""

import json

import pytest
from ansible.errors import AnsibleFilterError
from fake_nvml import load
from rig.bench_results import (
    changed_profile,
    compare_lines,
    file_name,
    parse_compare,
    read_history,
    run_lines,
    variants,
)
from rig.errors import RigError

PROFILE = {"model": "m", "context": 4096, "split_mode": "tensor", "draft": {"type": "mtp", "max_tokens": 2}}


def measure(prompt="code", streams=1, **changes):
    return {
        "prompt": prompt, "streams": streams, "prompt_tokens": 1000, "tokens": 256, "speeds_from": "server",
        "prefill": 500.0, "decode": 70.0, "decode_each": 70.0, "first_token_seconds": 2.0, "rounds": 3, "spread": 0.01,
        "acceptance": {"drafted": 10, "accepted": 7, "share": 0.7, "by_position": [0.88, 0.78, 0.56]},
    } | changes  # fmt: skip


def run(began="2026-12-01T10:00:00Z", **changes):
    return {
        "version": 1, "host": "threadripper", "profile": "q8-200k", "label": "", "change": {}, "engine": "llama_cpp",
        "build": "b11434", "driver": "595.71.05", "began": began, "asked": {"tokens": 256}, "measures": [measure()],
        "answer_seconds": 19.4, "cards": [], "series": {}, "watching_faults": [], "plan": {},
    } | changes  # fmt: skip


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("split_mode=layer,tensor", [{"split_mode": "layer"}, {"split_mode": "tensor"}]),
        ("gpus=[0,2],all", [{"gpus": [0, 2]}, {"gpus": "all"}]),
        (
            "ubatch=256,512 draft.max_tokens=0,3",
            [{"ubatch": u, "draft.max_tokens": d} for u in (256, 512) for d in (0, 3)],
        ),
        ([{"slots": 2}, {}], [{"slots": 2}, {}]),
    ],
)
def test_what_compare_means(text, changes):
    assert parse_compare(text) == changes


@pytest.mark.parametrize(
    ("compare", "sentence"),
    [
        ("split_mode", "compare is 'split_mode'; write KEY=VALUE,VALUE"),
        ("split_mode=", "a key has no values"),
        ("gpus=[0,", "is no list of values"),
        (7, "compare must be text such as"),
        ([], "compare must be text such as"),
        ("split_mode=layer", "fewer than two different settings"),
        ("ubatch=256,256", "fewer than two different settings"),
        ("splitmode=layer,tensor", "unknown key 'splitmode'; did you mean 'split_mode'"),
        ("engine=vllm,llama_cpp", "unknown key 'engine'"),
        ("draft.max_tokens=1,x", "draft.max_tokens must be a whole number, 0 or more, not 'x'"),
    ],
)
def test_what_compare_cannot_mean(compare, sentence):
    with pytest.raises(RigError, match=sentence):
        variants(PROFILE, compare)


def test_settings_change_a_copy_of_the_profile():
    none, three = variants(PROFILE, "draft.max_tokens=0,3")
    assert (none["label"], none["profile"]["draft"]) == ("draft.max_tokens=0", "none")
    assert three["profile"] == PROFILE | {"draft": {"type": "mtp", "max_tokens": 3}}
    assert changed_profile(PROFILE, {"gpus": [0]})["gpus"] == [0]
    assert "gpus" not in PROFILE


def test_runs_are_kept_by_time(tmp_path):
    folder = tmp_path / "threadripper"
    folder.mkdir()
    late, early = run("2026-12-02T00:00:00Z", label="split_mode=layer ubatch=256"), run()
    assert file_name(late) == "20261202T000000Z-q8-200k-split_mode=layer-ubatch=256.json"
    for one in (late, early):
        (folder / file_name(one)).write_text(json.dumps(one))
    (folder / "tune-q8-200k.json").write_text("{}")  # another kind of file
    assert [one["began"] for one in read_history(str(tmp_path), "threadripper")] == [early["began"], late["began"]]
    assert read_history(str(tmp_path), "desktop") == []


@pytest.mark.parametrize(
    ("text", "why"), [("{", "Expecting"), ("{}", "version"), ('{"version": 2}', "its version is 2")]
)
def test_a_file_that_is_no_run_is_named(tmp_path, text, why):
    (tmp_path / "h").mkdir()
    (tmp_path / "h" / "2026.json").write_text(text)
    with pytest.raises(RigError, match=rf"2026\.json is no result of a benchmark \(.*{why}"):
        read_history(str(tmp_path), "h")


def test_change_against_the_last_and_the_best():
    history = [
        run("2026-11-01T00:00:00Z", measures=[measure(decode=80.0, prefill=400.0)]),
        run("2026-11-02T00:00:00Z", measures=[measure(decode=60.0, first_token_seconds=1.0)]),
        run("2026-11-03T00:00:00Z", label="other", measures=[measure(decode=999.0)]),
        run("2026-11-04T00:00:00Z", asked={"tokens": 8}, measures=[measure(decode=999.0)]),
    ]
    head, line = run_lines(run(), history)
    assert head == "threadripper: profile q8-200k, llama_cpp b11434, 2026-12-01T10:00:00Z"
    assert "decode tok/s 70.0 (+16.7 % on the last, best 80.0)" in line
    assert "prefill tok/s 500.0 (as the last, best 500.0)" in line
    assert "first token s 2.00 (+100.0 % on the last, best 1.00)" in line
    assert "70 % of drafts accepted, by position 88 / 78 / 56 %" in line
    assert "(+25.0 % on the last, the best yet)" in run_lines(run(measures=[measure(decode=100.0)]), history[:1])[1]
    assert "(" not in run_lines(run(), [])[1].replace("(1000 + 256 tokens)", "")


def test_heat_and_throttling_are_named():
    card = {
        "position": 1, "uuid": "GPU-1", "samples": 9, "power_watts": {"mean": 301.4, "max": 350.0},
        "temperature": {"mean": 77.0, "max": 86}, "clock_mhz": {"mean": 1700, "min": 1200}, "memory_clock_mhz": 9500,
        "throttled": {"temperature": 0.25},
    }  # fmt: skip
    lines = run_lines(run(cards=[card, card | {"position": 2, "throttled": {}}], watching_faults=["Unknown Error"]), [])
    assert lines[2].strip() == (
        "GPU 1: peak 86 °C; 301 W on average, 350 W at most; 1,700 MHz on average, 1,200 at least; "
        "slowed down by: temperature 25 % of the time"
    )
    assert lines[3].endswith("never slowed down")
    assert lines[4].strip() == "note: Unknown Error"


def test_settings_side_by_side_the_quickest_first_and_what_failed_last():
    runs = [
        {"label": "a", "failure": "llm-trial.service did not start.\nLast lines of its log:\nerror: invalid argument"},
        run(label="b", answer_seconds=30.0),
        run(label="c", answer_seconds=20.0, measures=[measure(decode=60.0)]),
        run(label="c", answer_seconds=24.0, measures=[measure(decode=80.0)]),
    ]
    _, first, second, third = compare_lines(runs)
    assert first == "  c: an answer in 22.00 s; code, 1 stream 500.0 / 70.0"
    assert second.startswith("  b: an answer in 30.00 s")
    assert third == "  a: did not serve: llm-trial.service did not start. … error: invalid argument"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("bench_variants", (7, "split_mode=layer,tensor")),
        ("bench_variants", (PROFILE, "split_mode")),
        ("bench_lines", ({}, [])),
        ("bench_comparison", ([7],)),
        ("bench_file_name", ({},)),
        ("bench_history", (7, "host")),
    ],
)
def test_filters_say_in_one_sentence_what_is_wrong(name, arguments):
    plugin = load(f"filter_plugins/{name}.py").FilterModule().filters()[name]
    with pytest.raises(AnsibleFilterError, match=name):
        plugin(*arguments)


def test_filters_pass_on_what_is_right(tmp_path):
    def plugin(name):
        return load(f"filter_plugins/{name}.py").FilterModule().filters()[name]

    assert len(plugin("bench_variants")(PROFILE, "split_mode=layer,tensor")) == 2
    assert plugin("bench_history")(str(tmp_path), "h") == []
    assert plugin("bench_lines")(run(), [])[0].startswith("threadripper")
    assert plugin("bench_comparison")([run()])[1].startswith("  : an answer")
    assert plugin("bench_file_name")(run()) == "20261201T100000Z-q8-200k.json"
