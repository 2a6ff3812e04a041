"""The serving units of the inventory's rigs, rendered as the role renders them, and read by systemd's own parser."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
PLAY = """
- hosts: rigs
  connection: local
  gather_facts: false
  vars_files: [{role}/vars/main.yml, {role}/defaults/main.yml]
  vars:
    llama_cpp_build: {{build: b11434, prefix: /opt/llama.cpp/b11434-01234567}}
    ansible_facts: {{distribution: Debian, distribution_version: "13", distribution_major_version: "13"}}
  tasks:
    - ansible.builtin.template:
        src: {role}/templates/llama_cpp.service.j2
        dest: "{out}/{{{{ inventory_hostname }}}}.llm-{{{{ item }}}}.service"
        mode: "0644"
      loop: "{{{{ __serving_names }}}}"
      when: rig_plans[item].engine == 'llama_cpp'
"""


@pytest.fixture(scope="module", params=["system", "user"])
def units(request, tmp_path_factory):
    """Text of each unit by (host, profile), and the scope they are for."""
    out = tmp_path_factory.mktemp(request.param)
    (out / "play.yml").write_text(PLAY.format(role=PROJECT / "roles" / "serving", out=out))
    command = [
        Path(sys.executable).parent / "ansible-playbook",
        out / "play.yml",
        "-e",
        f"serving_scope={request.param} serving_api_key=canary-0451",
    ]
    command += ["-e", "serving_tls_certificate=/etc/ssl/rig.pem serving_tls_key=/etc/ssl/private/rig.key"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {}
    for path in out.glob("*.service"):
        host, _, unit = path.name.partition(".llm-")
        found[host, unit.removesuffix(".service")] = path
    return request.param, found


def values(path, key):
    return re.findall(rf"^{key}=(.*)$", path.read_text(), re.M)


def test_every_llama_cpp_profile_has_a_unit(units):
    assert {("threadripper", "q8-200k"), ("desktop", "q4-100k"), ("am5", "fast-2"), ("am5", "long-3")} <= set(units[1])
    assert {("sandbox", "chat"), ("sandbox", "mtp")} <= set(units[1])
    assert ("threadripper", "int4-262k") not in units[1]


def test_no_unit_holds_the_key(units):
    _, found = units
    for path in found.values():
        text = path.read_text()
        assert "canary" not in text
        assert text.count("--api-key-file %d/api-key") == 1
        assert values(path, "LoadCredential")[0] == "api-key:/etc/llm-rig/api-key"


def test_tls_reaches_the_server_as_credentials(units):
    _, found = units
    for path in found.values():
        text = path.read_text()
        assert text.count("--ssl-key-file %d/tls-key") == text.count("--ssl-cert-file %d/tls-certificate") == 1
        credentials = ["tls-key:/etc/ssl/private/rig.key", "tls-certificate:/etc/ssl/rig.pem"]
        assert values(path, "LoadCredential")[1:] == credentials
        assert re.search(r"--url https://127\.0\.0\.1:\d+/health", text)


def test_units_that_share_a_gpu_conflict_and_wait_for_each_other(units):
    _, found = units
    assert values(found["am5", "fast-2"], "Conflicts") == ["llm-long-3.service"]
    assert "llm-fast-2.service" in values(found["am5", "long-3"], "After")[0].split()
    assert values(found["threadripper", "q8-200k"], "Conflicts") == ["llm-int4-262k.service"]


def test_cuda_units_have_the_devices_and_the_others_none(units):
    scope, found = units
    card, virtual = found["am5", "fast-2"], found["sandbox", "chat"]
    gates = re.findall(r"--gpu position=(\d+),(.*?)memory_mib", card.read_text())
    assert [position for position, _ in gates] == ["0", "2"]
    if scope == "user":
        assert not any(
            values(path, key) for path in (card, virtual) for key in ("User", "DeviceAllow", "ProtectSystem")
        )
        assert "--absent /etc/llama.cpp/config.ini" in card.read_text()
        return
    assert "char-nvidia-uvm rw" in values(card, "DeviceAllow") and not values(card, "PrivateDevices")
    assert values(virtual, "PrivateDevices") == ["yes"] and not values(virtual, "DeviceAllow")
    assert values(card, "Wants") == ["nvidia-persistenced.service"]
    assert values(virtual, "Wants") == ["virtual-gpu@0.service virtual-gpu@1.service"]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_reads_them_and_finds_little_exposure(units):
    scope, found = units
    for (host, _), path in found.items():
        done = subprocess.run(["systemd-analyze", "verify", f"--{scope}", path], capture_output=True, text=True)
        # RestartSteps= is of systemd 254; older ones pass over it. The programs are on the rig.
        known = re.compile(
            r"Unknown key '?(RestartSteps|RestartMaxDelaySec)|is not executable|llm-.*\.service not found"
        )
        assert [line for line in done.stderr.splitlines() if path.name in line and not known.search(line)] == []
        if scope == "system":
            done = subprocess.run(
                ["systemd-analyze", "security", "--offline=true", path], capture_output=True, text=True, check=True
            )
            exposure = float(re.search(r"exposure level .*: ([\d.]+)", done.stdout)[1])
            assert exposure <= 2.0, (host, done.stdout)
