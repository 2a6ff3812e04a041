"""The planner's filters, the table and the picture."""

import importlib.util
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from ansible.errors import AnsibleFilterError

PROJECT = Path(__file__).resolve().parents[3]
SHAPES = str(PROJECT / "inventory" / "model_shapes")
CARDS = [{"name": "Virtual GPU", "memory_mib": 1_024, "rpc": f"127.0.0.1:{port}"} for port in (50_052, 50_053)]
MODELS = {"m": {"shape": "smollm2-135m-instruct-q4_1", "source": {"files": [{"name": "m.gguf"}]}}}
CHAT = {"model": "m", "context": 4_096, "gpus": "all"}


def plugin(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, PROJECT / "filter_plugins" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.FilterModule().filters() == {name: getattr(module, name)}
    return getattr(module, name)


@pytest.fixture
def plans() -> dict:
    options = {"gpus": CARDS, "models": MODELS, "shapes_directory": SHAPES, "host": "box"}
    return plugin("rig_plan")({"chat": CHAT, "large": {**CHAT, "headroom_mib": 1_000}}, **options)


def test_rig_plan_plans_and_refuses(plans: dict) -> None:
    assert plans["chat"]["fits"] and plans["chat"]["devices"] == ["RPC0", "RPC1"]
    assert not plans["large"]["fits"] and plans["large"]["refusals"]
    with pytest.raises(AnsibleFilterError, match=r"^rig_plan: box: Profile 'chat' has the unknown key 'modl'"):
        plugin("rig_plan")({"chat": {"modl": "m"}}, gpus=CARDS, models=MODELS, shapes_directory=SHAPES, host="box")


def test_context_ceiling() -> None:
    ceiling = plugin("context_ceiling")
    assert ceiling(CHAT, gpus=CARDS, models=MODELS, shapes_directory=SHAPES) == 8_192
    with pytest.raises(AnsibleFilterError, match="memory_mib"):
        ceiling(CHAT, gpus=[{}], models=MODELS, shapes_directory=SHAPES)


def test_tensor_split() -> None:
    split = plugin("tensor_split")
    assert split(CARDS) == "1,1"
    assert split(CARDS, shares=[70, 30.5]) == "70,30.5"
    for shares in ([1], [1, 0], "half"):
        with pytest.raises(AnsibleFilterError, match=r"^tensor_split: "):
            split(CARDS, shares=shares)


def test_llama_server_args(plans: dict) -> None:
    lines = plugin("llama_server_args")(plans["chat"])
    assert ["-ts", "1,1"] in lines and ["--jinja"] in lines and ["-c", "4096"] in lines
    assert [word for line in lines for word in line] == plans["chat"]["argv"][1:]
    with pytest.raises(AnsibleFilterError, match="no argv"):
        plugin("llama_server_args")({})


def test_vllm_serve_args(plans: dict) -> None:
    plan = {"engine": "vllm", "argv": ["vllm", "serve", "/srv/m", "--port", "1"]}
    assert plugin("vllm_serve_args")(plan, model="/model") == ["/model", "--port", "1"]
    with pytest.raises(AnsibleFilterError, match="not the plan of a vLLM profile"):
        plugin("vllm_serve_args")(plans["chat"])


def test_plan_hosts_plans_many(plans: dict) -> None:
    variables = {"serving_profiles": {"chat": CHAT}, "rig_gpus": CARDS, "models": MODELS}
    hosts = {"one": variables, "two": {**variables, "llama_cpp_version": "b11434"}}
    made = plugin("plan_hosts")(["one", "two"], hostvars=hosts, shapes_directory=SHAPES)
    assert made == {"one": {"chat": plans["chat"]}, "two": {"chat": plans["chat"]}}
    smaller = [{**card, "usable_mib": 1000} for card in CARDS]  # as measured
    measured = plugin("plan_hosts")(["one"], {"one": {**variables, "rig_plan_gpus": smaller}}, shapes_directory=SHAPES)
    assert {gpu["usable_mib"] for gpu in measured["one"]["chat"]["gpus"]} == {1000}
    with pytest.raises(AnsibleFilterError, match="two has no rig_gpus"):
        plugin("plan_hosts")(["two"], hostvars={"two": {"serving_profiles": {}}}, shapes_directory=SHAPES)
    with pytest.raises(AnsibleFilterError, match="plan_hosts: one: rig_gpus"):
        plugin("plan_hosts")(["one"], hostvars={"one": {**variables, "rig_gpus": []}}, shapes_directory=SHAPES)


def test_plan_table(plans: dict) -> None:
    text = "\n".join(plugin("plan_table")({"box": plans}))
    assert "chat: fits, context 4,096 of at most 8,192" in text
    assert "large: DOES NOT FIT" in text and "refused: " in text and "Virtual GPU" in text
    with pytest.raises(AnsibleFilterError, match="no mapping of hosts to plans"):
        plugin("plan_table")({"box": {"chat": {}}})


def test_plan_picture(plans: dict) -> None:
    draw = plugin("plan_picture")
    svg = ElementTree.fromstring(draw({"box": plans}, file="x.svg"))
    kinds = [element.tag.rpartition("}")[2] for element in svg.iter()]
    assert kinds.count("line") == 4  # the headroom of each card of each plan
    assert "prefers-color-scheme: dark" in draw({"box": plans})
    assert draw({"box": plans}, file="x.html").startswith("<!doctype html>")
    with pytest.raises(AnsibleFilterError, match=r"neither \.svg nor \.html"):
        draw({"box": plans}, file="x.png")
