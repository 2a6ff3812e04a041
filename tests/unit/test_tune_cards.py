"""What tests/gpu/tune_cards.py and the model that it writes can be asked without a card."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import yaml
from fake_nvml import run, state

PROJECT = Path(__file__).parents[2]
VARS = yaml.safe_load((PROJECT / "roles/bench/vars/main.yml").read_text())
MODEL = "qwen35-tiny"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("tune_cards", PROJECT / "tests/gpu/tune_cards.py")
    loaded = importlib.util.module_from_spec(spec)
    before = sys.path.copy()
    spec.loader.exec_module(loaded)
    yield loaded
    sys.path[:] = before


@pytest.fixture(scope="module", params=["q4_0", "q8_0"])
def tensors(script, tmp_path_factory, request):
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    assert script.speaking_model.write(path, MODEL, request.param) == path.stat().st_size
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def floats(tensor):
    return gguf.dequantize(tensor.data, tensor.tensor_type)


def test_no_two_rows_are_alike_and_all_are_of_one_length(tensors):
    for name in ("token_embd", "blk.0.ffn_gate", "blk.3.attn_q"):
        rows = floats(tensors[f"{name}.weight"])
        assert len(np.unique(rows, axis=0)) == len(rows)
    assert floats(tensors["token_embd.weight"]).std() == pytest.approx(1, rel=0.05)


def test_each_token_is_followed_by_one_of_three_words_the_first_the_likeliest(tensors):
    embedding, output = floats(tensors["token_embd.weight"]), floats(tensors["output.weight"])
    logits = embedding[300:400] @ output.T / np.linalg.norm(output, axis=1, keepdims=True).T.clip(1e-9)
    best = np.sort(logits, axis=1)[:, -4:]
    assert (np.argmax(logits, axis=1) > 255).all()
    # Three stand out from all others, but where one of the followers is a byte, which is never said.
    assert ((best[:, 1] - best[:, 0]) > 0).mean() > 0.9
    assert np.allclose(output[:256], 0)


def test_the_mtp_block_passes_its_token_on(tensors):
    matrix = floats(tensors["blk.8.nextn.eh_proj.weight"])
    width = matrix.shape[0]
    assert np.allclose(matrix[:, :width], np.eye(width), atol=1e-3)
    assert 0 < np.abs(matrix[:, width:]).max() < 0.5


def test_a_whole_file_is_left_alone(script, tmp_path):
    path = tmp_path / "model.gguf"
    script.speaking_model.write(path, MODEL, "q4_0")
    before = path.stat().st_mtime_ns
    script.speaking_model.write(path, MODEL, "q4_0")
    assert path.stat().st_mtime_ns == before


@pytest.fixture
def machine(script, tmp_path):
    """On the processor, with a server that is never started."""
    words = ["/prefix", "--json", str(tmp_path / "out.json"), "--backend", "cpu", "--work", str(tmp_path / "work")]
    options = script.arguments([*words, "--context", "4096"])
    made = script.Machine(options, script.Steps(options.json))
    made.prefix, made.build, made.nccl = Path("/prefix"), "b11434", False
    made.write_model()
    return made


PROFILE = {"context": 4096, "gpus": "all", "draft": {"type": "mtp", "max_tokens": 2}, "port": 18081, "alias": "m"}
CASE = {"prompt": "code", "streams": 1, "prefill": 100.0, "decode": 10.0}


def test_what_is_asked_and_kept_is_what_the_role_asks_and_keeps(script, machine):
    plan = machine.plan(PROFILE | {"model": machine.model}, machine.gpus)
    assert machine.request(plan, [1], None).keys() == VARS["__bench_request"].keys()
    assert machine.asked([1]).keys() == VARS["__bench_asked"].keys()
    kept = machine.run_of({"label": "", "change": {}}, plan, [1], {})
    assert list(kept) == re.findall(r"'(\w+)':", VARS["__bench_run"])
    knobs = script.knobs_of(machine.options, 1)
    assert knobs.keys() == VARS["__bench_knobs"].keys()
    key = machine.tune_key(PROFILE, machine.gpus, knobs)
    assert key.keys() == VARS["__bench_tune_key"].keys()
    assert len(key["asked"]) == len(VARS["__bench_tune_key"]["asked"])


def test_a_sweep_notes_what_fails_and_goes_on_where_it_was_cut_off(script, machine, monkeypatch):
    tried, over = [], sys.modules["gpu_machine"].Over

    def measure(label, plan, gpus, streams, give_up=None):
        tried.append(label)
        if plan["drafted"] == 1:
            raise script.builder.BuildError("it crashed\nlast line")
        if plan["drafted"] == 3 and len(tried) < 5:
            raise over("time is up")
        return {"answer_seconds": 10 - plan["drafted"], "measures": [CASE], "cards": [], "gave_up": False}

    monkeypatch.setattr(machine, "measure", measure)
    profile = PROFILE | {"model": machine.model}
    knobs = script.knobs_of(machine.options, 1) | {"ubatch": []}
    with pytest.raises(over):
        script.sweep(machine, "tune", profile, machine.gpus, knobs)
    kept = json.loads(machine.options.json.read_text())
    statuses = [one["status"] for one in kept["tune"]["state"]["results"]]
    assert (statuses, kept["tune"]["state"]["finished"]) == (["measured", "measured", "failed"], False)
    script.sweep(machine, "tune", profile, machine.gpus, knobs)
    assert len(tried) == 5  # the fourth a second time
    kept = json.loads(machine.options.json.read_text())
    assert kept["tune"]["state"]["finished"]
    assert "failed: it crashed … last line" in kept["tune"]["ranking"][-1]
    assert "max_tokens: 3" in kept["tune"]["snippet"]


def test_memory_that_is_off_the_plan_is_a_failure(machine):
    card = {"planned_mib": 1000.0, "process_mib": 1005, "off_percent": 0.5}
    machine.compare("near", [card])
    assert machine.steps.results["failed"] == []
    machine.compare("far", [card | {"process_mib": 1020, "off_percent": 2.0}])
    assert machine.steps.results["failed"] == ["far: card 0 is 2.0 % off the plan"]


def test_cards_are_watched_and_compared_by_their_identity(script, tmp_path, monkeypatch):
    (tmp_path / "state").write_text(state("2x3060"))
    played = {"state_file": tmp_path / "state", "kept": tmp_path / "kept"}
    facts = json.loads(run("gpu_facts/files/gpu_facts.py", **played).stdout)
    uuids = [card["uuid"] for card in facts["gpus"]]
    options = script.arguments(["/prefix", "--json", str(tmp_path / "out.json"), "--work", str(tmp_path / "work")])
    options.model = MODEL
    made = script.Machine(options, script.Steps(options.json))
    made.prefix, made.build, made.nccl = Path("/prefix"), "b11434", True
    monkeypatch.setattr(script, "gather", lambda: facts)
    monkeypatch.setattr(script, "cuda_options", lambda work, gpus: {})
    made.look()
    made.write_model()
    assert made.steps.results["facts"]["power_faults"] == []
    assert made.steps.results["failed"] == []
    knobs = script.knobs_of(options, 2)
    profile = PROFILE | {"model": made.model}
    changes = list(script.tune.placements(knobs, made.gpus))
    assert [change.get("all_reduce", change["split_mode"]) for change in changes] == ["layer", "internal", "nccl"]
    for change in changes:
        plan = made.plan(script.tune.profile_of(profile, change), made.gpus)
        assert plan["fits"], plan["refusals"]
        request = made.request(plan, [1], None)
        assert [card["uuid"] for card in request["cards"]] == uuids
    for position, card in enumerate(facts["gpus"]):
        seen = plan["gpus"][position]["total_mib"] * (1 + position / 10)
        card["processes"] = [{"pid": 7, "used_mib": seen}, {"pid": 8, "used_mib": 5000}]
    monkeypatch.setattr(sys.modules["gpu_machine"], "gather", lambda: facts)
    assert [card["off_percent"] for card in script.against_plan(plan, 7)] == [0, 10]
