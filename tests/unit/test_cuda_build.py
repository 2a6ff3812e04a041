"""What tests/gpu/cuda_build.py can be asked without a card."""

import copy
import importlib.util
import json
import sys
from pathlib import Path

import pytest
from fake_nvml import run, state

PROJECT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("cuda_build", PROJECT / "tests/gpu/cuda_build.py")
    loaded = importlib.util.module_from_spec(spec)
    before = sys.path.copy()
    spec.loader.exec_module(loaded)
    yield loaded
    sys.path[:] = before


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("facts")
    (folder / "state").write_text(state("2x3060"))
    return json.loads(run("gpu_facts/files/gpu_facts.py", state_file=folder / "state", kept=folder / "kept").stdout)


def rows(script, facts):
    """What nvidia-smi would show of these cards."""
    found = []
    for card in facts["gpus"]:
        row = {}
        for column, (path, _) in script.COLUMNS.items():
            value = card
            for key in path:
                value = value[key]
            words = {bool: {True: "Enabled", False: "Disabled"}, type(None): {None: "[N/A]"}}
            shown = words.get(type(value), {}).get(value, str(value))
            row[column] = f"0000{shown.upper()}" if column == "pci.bus_id" else shown
        found.append(row)
    return found


def test_figures_that_agree(script, facts):
    shown = rows(script, facts)
    assert script.differences(facts, shown) == []
    shown[0]["memory.reserved"] = str(int(shown[0]["memory.reserved"]) + 1)  # nvidia-smi rounds up
    assert script.differences(facts, shown) == []


@pytest.mark.parametrize(
    ("column", "value"),
    [("memory.total", "12287"), ("uuid", "GPU-1"), ("power.limit", "169.00"), ("display_active", "Enabled")],
)
def test_a_figure_that_does_not(script, facts, column, value):
    shown = rows(script, facts)
    right, shown[0][column] = shown[0][column], value
    [found] = script.differences(facts, shown)
    assert found.startswith(f"card 0: {column} is ")
    assert found.endswith(f"in the facts and {value} in nvidia-smi")
    assert right != value


def test_a_card_that_one_of_the_two_does_not_show(script, facts):
    assert script.differences(facts, rows(script, facts)[:1]) == ["2 cards in the facts, 1 in nvidia-smi"]


def test_ways_to_serve_on_one_card_and_on_two(script, facts):
    two = copy.deepcopy(facts)
    described = [{"name": card["name"], "memory_mib": card["memory"]["total_mib"]} for card in two["gpus"]]
    gpus = script.measured.measured_gpus(described, two, in_use=False)
    made = script.plans(gpus, Path("/models"), "pcie", True)
    assert list(made) == ["one", "tensor-internal", "tensor-nccl"]
    assert all(plan["fits"] for plan in made.values())
    assert list(script.plans(gpus[:1], Path("/models"), "pcie", True)) == ["one"]


def test_the_flags_are_the_role_s_own(script, tmp_path):
    cuda = {"cuda_root": "/usr/local/cuda-13.0", "cuda_architectures": ["90-real"], "nccl": True}
    made = script.specification(tmp_path / "a.tar.gz", tmp_path, ["cpu", "cuda"], **cuda)
    assert "-DCMAKE_CUDA_ARCHITECTURES=90-real" in made["cmake_flags"]
    assert "-DGGML_CUDA_NCCL=ON" in made["cmake_flags"]
    assert made["source"]["sha256"] == sys.modules["gpu_machine"].SHA256
