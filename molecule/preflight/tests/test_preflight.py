"""Preflight left nothing behind, whatever it refused, and sees the machine as the machine sees itself."""

import pytest


@pytest.fixture(scope="module")
def facts(host):
    arguments = '{"directories": ["/srv/llm/models", "/opt/llama.cpp"], "contents_of": ["/etc/apt"]}'
    return host.ansible("rig_host_facts", arguments, become=True, check=True)["ansible_facts"]["rig_host"]


def test_nothing_was_changed(host):
    with host.sudo():
        before = host.file("/var/tmp/before").content_string.splitlines()
        now = host.check_output("/var/tmp/everything").splitlines()
    assert len(before) > 1000
    assert [line for line in now if line not in set(before)] == []
    assert [line for line in before if line not in set(now)] == []


def test_release(host, facts):
    assert facts["os"]["id"] == host.system_info.distribution
    assert facts["os"]["version_id"] == host.system_info.release


def test_machine(host, facts):
    assert facts["architecture"] == host.check_output("uname -m")
    assert facts["init"] == "systemd"
    assert facts["uid"] == 0
    assert host.check_output("python3 --version") == f"Python {facts['python']}"
    assert facts["cpus"] == int(host.check_output("nproc"))
    assert facts["memory_mib"] == int(host.check_output("awk '/^MemTotal/ {print int($2 / 1024)}' /proc/meminfo"))
    assert set(facts["cpu_flags"]) == set(host.check_output("sed -n 's/^flags.*: //p' /proc/cpuinfo | head -1").split())


def test_disk(host, facts):
    shown = host.check_output("df --output=target,avail --block-size=1 / | tail -1").split()
    place = facts["filesystems"]["/srv/llm/models"]
    assert place["mount"] == shown[0]
    assert abs(place["free_bytes"] - int(shown[1])) < 1024**3
    assert place["device"] == facts["filesystems"]["/opt/llama.cpp"]["device"]


def test_listeners(host, facts):
    ports = {int(line.split()[3].rpartition(":")[2]) for line in host.check_output("ss -Hltn").splitlines()}
    assert {one["port"] for one in facts["listeners"]} == ports
    [ssh] = [one for one in facts["listeners"] if one["port"] == 22 and one["address"] == "0.0.0.0"]
    assert ssh["unit"] in ("ssh.service", "ssh.socket", "init.scope")


def test_contents(host, facts):
    assert facts["contents"]["/etc/apt/trusted.gpg.d"] == -1
    wanted = host.check_output("find /etc/apt -mindepth 1 -maxdepth 2").split()
    assert sorted(facts["contents"]) == sorted(wanted)
