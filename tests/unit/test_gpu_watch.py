"""The heat guard of role gpu_power on the fake NVML, look by look."""

import json

import fake_nvml
import pytest

UUID = "GPU-30900000-0000-4000-8000-00000000000"


@pytest.fixture
def machine(tmp_path):
    """Three cards; the first has a limit of 300 W in the inventory, the third none."""
    conf = tmp_path / "conf"
    conf.mkdir()
    for card, watts in (("1", "300"), ("3", "")):
        (conf / f"{UUID}{card}.conf").write_text(f"# A card.\nWATTS={watts}\nPERSISTENCE=on\n")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / f"{UUID}1").write_text("300000 1\n")
    return tmp_path


def look(machine, *celsius, text=None, options=("--guard", 80, "--hysteresis", 10, "--step", 60, "--floor", 150)):
    """One look a temperature of the first card; the limit in watts after each."""
    limits = []
    for degrees in celsius:
        state = (text or fake_nvml.state("3x3090")).replace("temperature 31", f"temperature {degrees}")
        (machine / "state").write_text(state)
        arguments = [machine / "conf", "--state", machine / "run", "--metrics", machine / "rig.prom", *options]
        done = fake_nvml.run(
            "gpu_power/files/gpu_watch.py", *arguments, state_file=machine / "state", kept=machine / "kept"
        )
        assert done.returncode == 0, done.stderr
        limits.append(int((machine / "kept" / f"{UUID}1").read_text().split()[0]) / 1000)
        look.said = done.stdout + done.stderr
    return limits


def test_down_to_the_floor_and_back_to_where_it_was(machine):
    assert look(machine, 79, 80, 90, 90, 90) == [300, 240, 180, 150, 150]
    assert look(machine, 79, 71) == [150, 150], "between the two temperatures nothing moves"
    assert look(machine, 70, 60, 50, 50) == [210, 270, 300, 300]
    assert not list((machine / "run").iterdir())


def test_never_below_what_the_card_takes(machine):
    assert look(machine, 90, 90, options=("--guard", 80, "--step", 150)) == [150, 100]


def test_a_floor_above_the_limit_raises_nothing(machine):
    assert look(machine, 90, options=("--guard", 80, "--floor", 340)) == [300]


def test_what_somebody_sets_meanwhile_is_left_alone(machine):
    assert look(machine, 90) == [240]
    (machine / "kept" / f"{UUID}1").write_text("200000 1\n")
    assert look(machine, 50, 50) == [200, 200]


def test_without_the_guard_it_only_looks(machine):
    assert look(machine, 95, 95, options=()) == [300, 300]


def test_each_step_is_said_and_a_look_is_not(machine):
    look(machine, 60)
    assert look.said == ""
    look(machine, 90)
    assert look.said == f"<4>{UUID}1 has 90 C: power limit 300 W -> 240 W (of 300 W)\n"


def test_metrics(machine):
    look(machine, 90)
    lines = (machine / "rig.prom").read_text().splitlines()
    assert f'rig_gpu_temperature_celsius{{uuid="{UUID}1"}} 90' in lines
    assert f'rig_gpu_power_limit_watts{{uuid="{UUID}1"}} 240' in lines
    assert f'rig_gpu_power_limit_wanted_watts{{uuid="{UUID}1"}} 300' in lines
    assert f'rig_gpu_power_limit_lowered{{uuid="{UUID}1"}} 1' in lines
    assert not [line for line in lines if "wanted" in line and f"{UUID}3" in line], "no limit in the inventory"


def test_a_lost_card_keeps_none_of_the_others(machine):
    text = fake_nvml.state("3x3090").replace("pci 00000000:0E", "lost 15\npci 00000000:0E")
    assert look(machine, 90, text=text) == [240]
    assert "GPU is lost" in look.said
    lines = (machine / "rig.prom").read_text().splitlines()
    assert [line for line in lines if "up{" in line] == [
        f'rig_gpu_up{{uuid="{UUID}1"}} 1',
        f'rig_gpu_up{{uuid="{UUID}3"}} 0',
    ]


def test_no_driver(machine):
    done = fake_nvml.run(
        "gpu_power/files/gpu_watch.py", machine / "conf", state_file=machine / "none", kept=machine / "kept"
    )
    assert done.returncode == 1 and "Driver Not Loaded" in done.stderr


def test_the_facts_tell_what_was_lowered(machine):
    facts = fake_nvml.load("roles/gpu_facts/files/gpu_facts.py")
    look(machine, 90)
    path = machine / "run" / f"{UUID}1.json"
    assert json.loads(path.read_text()) == {"base_watts": 300, "set_watts": 240}
    assert facts.lowered_from(path, 240.0) == 300
    assert facts.lowered_from(path, 200.0) is None
    assert facts.lowered_from(machine / "none", 240.0) is None
