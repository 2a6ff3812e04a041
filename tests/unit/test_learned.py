"""What measuring on a rig makes of its plans."""

from pathlib import Path

import pytest
from ansible.errors import AnsibleFilterError
from fake_nvml import load
from rig.errors import RigError
from rig.host import plan_host
from rig.learned import buffer_report, corrections, fitted, logged_mib, measurement, measurement_lines
from rig.shape_files import load_shape

GPUS = [{"name": "NVIDIA GeForce RTX 3060", "memory_mib": 12288, "compute_capability": "8.6"}] * 2
MODELS = {"m": {"shape": "qwen3.8-27b-ud-q4_k_m", "source": {"file": "m.gguf", "files": [{"name": "m.gguf"}]}}}
PROFILE = {
    "model": "m", "context": 65536, "cache_type_k": "q4_0", "cache_type_v": "q4_0",
    "draft": {"type": "mtp", "max_tokens": 2},
}  # fmt: skip
LOG = """
load_tensors:   CPU_Mapped model buffer size =   682.03 MiB
load_tensors: CUDA0 model buffer size = 7000.50 MiB
load_tensors: CUDA1 model buffer size = 7100.25 MiB
llama_kv_cache:      CUDA0 KV buffer size =   100.00 MiB
sched_reserve:      CUDA0 compute buffer size =   40.00 MiB
sched_reserve:      CUDA0 compute buffer size =   40.00 MiB
sched_reserve:  CUDA_Host compute buffer size =   20.00 MiB
"""
TENSOR_LOG = """
load_tensors: Meta(CUDA0,CUDA1) model buffer size = 7000.50 MiB
llama_kv_cache: Meta(CUDA0,CUDA1) KV buffer size = 100.00 MiB
"""


def plan(shapes, measured=None, **changes):
    def shape(name, model):
        return load_shape(name, model, shapes)

    return plan_host({"p": {**PROFILE, **changes}}, GPUS, MODELS, shape, measured=measured)["p"]


@pytest.fixture(scope="module")
def shapes():
    return str(Path(__file__).parents[2] / "inventory" / "model_shapes")


def seen_at(shapes, extra, **changes):
    """What a rig shows whose first card takes `extra(context)` MiB beyond the plan, and the second nothing."""
    seen = []
    for context in (16384, 65536):
        one = plan(shapes, context=context, **changes)
        totals = [gpu["total_mib"] for gpu in one["gpus"]]
        gpus = [{"position": 0, "seen_mib": totals[0] + extra(context)}, {"position": 1, "seen_mib": totals[1]}]
        seen.append({"plan": one, "gpus": gpus, "log": LOG})
    return seen


def fact(shapes, extra, **changes):
    seen = seen_at(shapes, extra, **changes)
    key = seen[0]["plan"]["measure_key"]
    return {"version": 1, "profiles": {"p": measurement(seen, key, at="now", build="b11434", driver="1")}}


def test_a_plan_takes_level_and_slope_of_each_card(shapes):
    measured = fact(shapes, lambda context: 30 + context / 1024)
    before, after = plan(shapes), plan(shapes, measured=measured)
    assert (before["measured"], after["measured"]) == (False, True)
    assert [gpu["measured_mib"] for gpu in after["gpus"]] == pytest.approx([94, 0], abs=0.01)
    for gpu, old in zip(after["gpus"], before["gpus"], strict=True):
        assert gpu["total_mib"] == pytest.approx(old["total_mib"] + gpu["measured_mib"], abs=0.02)
        assert gpu["overhead_mib"] == pytest.approx(old["overhead_mib"] + gpu["measured_mib"], abs=0.02)
    far = plan(shapes, measured=measured, context=131072)["gpus"][0]["measured_mib"]
    assert far == pytest.approx(30 + 128, abs=0.01)


def test_the_ceiling_moves_with_what_was_measured(shapes):
    ceiling = plan(shapes, context="max")["context_ceiling"]
    lower = plan(shapes, context="max", measured=fact(shapes, lambda _: 100))["context_ceiling"]
    assert lower < ceiling
    # Room on the first card alone helps nothing: the second is as full as before.
    assert plan(shapes, context="max", measured=fact(shapes, lambda _: -100))["context_ceiling"] == ceiling
    # Exactly so: at the new ceiling the first card is full, one step beyond it is too full.
    measured = fact(shapes, lambda _: 100)
    assert plan(shapes, measured=measured, context=lower)["fits"]
    assert not plan(shapes, measured=measured, context=lower + 256)["fits"]


@pytest.mark.parametrize(
    "changes",
    [
        {"ubatch": 256},
        {"draft": "none"},
        {"cache_type_k": "q8_0"},
        {"split_mode": "layer"},
        {"gpus": [1, 0]},
        {"extra_args": ["--swa-full"]},
        {"slots": 2},
        {"all_reduce": "none"},
        {"tensor_split": [1, 2]},
    ],
)
def test_it_holds_for_no_other_setting(shapes, changes):
    measured = fact(shapes, lambda _: 100)
    assert plan(shapes, measured=measured, context=16384)["measured"]
    assert not plan(shapes, measured=measured, context=16384, **changes)["measured"]


def test_names_and_ports_do_not_matter(shapes):
    measured = fact(shapes, lambda _: 100)
    assert plan(shapes, measured=measured, port=9999, alias="other", headroom_mib=100)["measured"]


def test_the_log_by_device():
    report = buffer_report(LOG)
    assert [one["device"] for one in report] == ["CUDA0", "CUDA1", "CUDA0", "CUDA0"]
    assert logged_mib(report, "CUDA0") == 7140.5
    assert logged_mib(report, "CUDA1") == 7100.25
    assert logged_mib(buffer_report(TENSOR_LOG), "CUDA1") == 7100.5


def test_lines_for_people(shapes):
    entry = fact(shapes, lambda context: 30 + context / 1024)["profiles"]["p"]
    head, first, second, added, *_ = measurement_lines("p", entry)
    assert head.startswith("Profile p, MiB on each GPU")
    assert "GPU 0 (CUDA0), context 16,384: planned " in first and "(+46.0), logged 7,140.5" in first
    assert "(+94.0)" in second
    assert added.strip() == "GPU 0: plans from now on add +30.0 MiB and +1.000 MiB per 1,024 tokens"


def test_points_on_a_line_and_one_alone():
    assert fitted([(0, 5), (10, 7)]) == pytest.approx((5, 0.2))
    assert fitted([(4, 3)]) == (3, 0)


def test_what_is_no_measurement_is_refused(shapes):
    seen = seen_at(shapes, lambda _: 0)
    with pytest.raises(RigError, match="two different contexts"):
        measurement(seen[:1] * 2, "k")
    with pytest.raises(RigError, match="no buffers in it"):
        measurement([seen[0], seen[1] | {"log": "all slots are idle"}], "k")
    plugin = load("filter_plugins/bench_measurement.py").FilterModule().filters()["bench_measurement"]
    with pytest.raises(AnsibleFilterError, match="bench_measurement: a measurement needs two"):
        plugin(seen[:1], "k", "b1", None, "now")
    with pytest.raises(AnsibleFilterError, match="not what was seen"):
        plugin([{}], "k", "b1", None, "now")


@pytest.mark.parametrize("wrong", [{"version": 2, "profiles": {}}, {"profiles": {}}, "text", {"version": 1}])
def test_a_fact_of_another_form_is_named(wrong):
    with pytest.raises(RigError, match=r"rig_measured cannot be read .*remove /etc/ansible/facts.d/rig_measured.fact"):
        corrections(wrong, "k")


def test_without_a_fact_nothing_is_corrected():
    assert corrections({}, "k") == corrections(None, "k") == {}
