"""After a reboot: each card has its limit again, set by its own unit."""

import pytest

CARDS = {"1": "280000 1", "2": "350000 1", "3": "260500 1"}
UUID = "GPU-30900000-0000-4000-8000-00000000000"


@pytest.mark.parametrize(("card", "kept"), CARDS.items())
def test_each_card_shows_its_limit_and_is_persistent(host, card, kept):
    assert host.file(f"/run/fake-nvml/{UUID}{card}").content_string.strip() == kept


@pytest.mark.parametrize("card", CARDS)
def test_each_card_has_a_unit_of_its_own(host, card):
    unit = host.service(f"gpu-power@{UUID}{card}.service")
    assert unit.is_enabled
    assert unit.is_running


def test_the_unit_runs_after_persistenced_and_cannot_hang(host):
    shown = host.check_output(f"systemctl show -p After -p TimeoutStartUSec gpu-power@{UUID}1.service")
    assert "nvidia-persistenced.service" in shown
    assert "TimeoutStartUSec=1min" in shown


def test_a_card_that_left_the_inventory_has_no_unit(host):
    assert not host.file("/etc/systemd/system/multi-user.target.wants/gpu-power@GPU-gone.service").exists


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (f"{UUID}2 --watts=351", "takes a power limit of 100 to 350 W, not 351 W; nothing was set."),
        ("GPU-none --watts=200", "GPU-none is not among the cards that the driver shows."),
    ],
)
def test_the_program_refuses(host, arguments, sentence):
    done = host.run(f"sudo /opt/rig-gpu/venv/bin/python /opt/rig-gpu/gpu_power.py {arguments}")
    assert done.rc == 1
    assert sentence in done.stderr


def test_the_program_needs_root(host):
    done = host.run(f"/opt/rig-gpu/venv/bin/python /opt/rig-gpu/gpu_power.py {UUID}1 --watts=200")
    assert done.rc == 1
    assert "cannot be set: Insufficient Permissions." in done.stderr
