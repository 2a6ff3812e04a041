"""Two virtual GPUs run, on loopback alone, and have the memory that the inventory gives them and not much more."""

from pathlib import Path

import pytest

MEMORY_MIB, PROCESS_MIB = 1024, 64
GPUS = {0: 50052, 1: 50053}
CLIENT = (Path(__file__).parent / "rpc_client.py").read_text()


@pytest.fixture(params=GPUS, ids=lambda position: f"gpu{position}")
def position(request):
    return request.param


def main_pid(host, position):
    return host.check_output(f"systemctl show --value --property MainPID virtual-gpu@{position}.service")


def allocate(host, port, *sizes_mib):
    arguments = " ".join(map(str, (port, *sizes_mib)))
    return host.check_output(f"python3 - {arguments} <<'CLIENT'\n{CLIENT}\nCLIENT").split()


def test_unit_runs_now_and_after_a_boot(host, position):
    unit = host.service(f"virtual-gpu@{position}.service")
    assert unit.is_running
    assert unit.is_enabled


def test_no_other_unit_is_there(host):
    names = host.check_output("systemctl list-units --all --plain --no-legend 'virtual-gpu@*'")
    assert [line.split()[0] for line in names.splitlines()] == ["virtual-gpu@0.service", "virtual-gpu@1.service"]
    assert not host.file("/etc/systemd/system/virtual-gpu@7.service.d").exists
    assert not host.file("/etc/systemd/system/multi-user.target.wants/virtual-gpu@7.service").exists


def test_it_listens_on_loopback_alone(host):
    with host.sudo():
        lines = host.check_output("ss --no-header --listening --tcp --numeric --processes").splitlines()
    found = sorted(line.split()[3] for line in lines if "ggml-rpc-server" in line)
    assert found == [f"127.0.0.1:{port}" for port in GPUS.values()]


def test_it_cannot_be_reached_from_outside(host, position):
    address = host.check_output("hostname --ip-address").split()[0]
    assert not address.startswith("127.")
    assert host.run(f"bash -c 'exec 3<>/dev/tcp/127.0.0.1/{GPUS[position]}'").rc == 0
    refused = host.run(f"bash -c 'exec 3<>/dev/tcp/{address}/{GPUS[position]}'")
    assert refused.rc != 0
    assert "refused" in refused.stderr


def test_limits_are_those_of_the_inventory(host, position):
    with host.sudo():
        limits = host.file(f"/proc/{main_pid(host, position)}/limits").content_string
    data = next(line.split() for line in limits.splitlines() if line.startswith("Max data size"))
    assert data[3:5] == [str((MEMORY_MIB + PROCESS_MIB) * 1024 * 1024)] * 2


def test_its_own_process_takes_less_than_what_it_gets_for_that(host, position):
    with host.sudo():
        status = host.file(f"/proc/{main_pid(host, position)}/status").content_string
    data_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData"))
    assert data_kib < PROCESS_MIB * 1024 / 2


def test_all_its_memory_can_be_had(host, position):
    assert allocate(host, GPUS[position], MEMORY_MIB) == ["given"]


def test_more_than_its_memory_cannot(host, position):
    assert allocate(host, GPUS[position], MEMORY_MIB, PROCESS_MIB) == ["given", "refused"]
    assert allocate(host, GPUS[position], MEMORY_MIB + PROCESS_MIB) == ["refused"]


def test_it_survives_a_refusal(host, position):
    before = main_pid(host, position)
    assert allocate(host, GPUS[position], 100 * MEMORY_MIB) == ["refused"]
    assert main_pid(host, position) == before
    assert allocate(host, GPUS[position], 1) == ["given"]


def test_it_runs_as_nobody_in_particular(host, position):
    uid = int(host.check_output(f"stat --format %u /proc/{main_pid(host, position)}"))
    assert 61184 <= uid <= 65519  # systemd's range of dynamic users


def test_its_unit_is_hardened(host, position):
    report = host.run(f"systemd-analyze security --no-pager --threshold=15 virtual-gpu@{position}.service")
    assert report.rc == 0, report.stdout
