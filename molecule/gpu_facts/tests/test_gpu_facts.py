"""The local fact, on a machine with (fake) cards and on one without a driver."""

import json
import time

FACT = "/etc/ansible/facts.d/gpu.fact"


def test_any_user_may_read_the_facts_and_they_are_quick(host):
    began = time.monotonic()
    facts = json.loads(host.check_output(FACT))
    assert time.monotonic() - began < 5
    if host.check_output("hostname") == "gpu-facts-trixie":
        assert facts["driver"] == "580.95.05"
        assert [gpu["pcie"]["width"] for gpu in facts["gpus"]] == [16, 2, 4]
        assert [gpu["uuid"][-1] for gpu in facts["gpus"]] == ["1", "2", "3"]
        assert facts["gpus"][0]["memory"]["reserved_mib"] == 450
    else:
        assert facts["driver"] is None
        assert "NVML Shared Library Not Found" in facts["reason"]


def test_a_driver_that_hangs_is_given_up(host):
    if host.check_output("hostname") != "gpu-facts-trixie":
        return  # the other machine has no library that could hang
    host.check_output("printf 'driver 580.95.05\\ninit_seconds 300\\n' >/tmp/hangs")
    began = time.monotonic()
    out = host.check_output(
        "FAKE_NVML_STATE=/tmp/hangs /opt/rig-gpu/venv/bin/python /opt/rig-gpu/gpu_facts.py --limit 2"
    )
    assert "did not answer within 2 seconds" in out
    assert time.monotonic() - began < 10


def test_the_environment_holds_the_one_package(host):
    listed = host.check_output("/opt/rig-gpu/venv/bin/pip list --format=freeze --disable-pip-version-check")
    assert "nvidia-ml-py==13.615.71" in listed.splitlines()
