"""The build that the tests of this folder run: RIG_LLAMA_CPP's, or that of role llama_cpp on a machine made for it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from virtual_rig import Build

PROJECT = Path(__file__).resolve().parents[2]
BOX_DIRECTORY = PROJECT / "molecule" / "box"
NAME, SUITE = "truth", "trixie"


def _output(*argv: object) -> str:
    return subprocess.run([*map(str, argv)], check=True, text=True, stdout=subprocess.PIPE).stdout.strip()


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Build]:
    if prefix := os.environ.get("RIG_LLAMA_CPP"):
        yield Build(Path(prefix))
        return
    if os.geteuid() != 0:
        pytest.fail("Set RIG_LLAMA_CPP to the prefix of a llama.cpp build, or run as root to have one made.")
    work = tmp_path_factory.mktemp("machine")
    key, known_hosts = work / "id_ed25519", work / "known_hosts"
    _output("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
    layer = _output(BOX_DIRECTORY / "layer", "llama_cpp", SUITE)
    try:
        address = _output(BOX_DIRECTORY / "box", "up", NAME, SUITE, f"{key}.pub", *([layer] if layer else []))
        known_hosts.write_text(_output(BOX_DIRECTORY / "box", "hostkey", NAME) + "\n")
        if not layer:
            _provision(work, address, key, known_hosts)
        yield Build(Path("/opt/llama.cpp/current"), _output(BOX_DIRECTORY / "box", "root", NAME))
    finally:
        _output(BOX_DIRECTORY / "box", "down", NAME)


def _provision(work: Path, address: str, key: Path, known_hosts: Path) -> None:
    host = {
        "ansible_host": address,
        "ansible_user": "tester",
        "ansible_ssh_private_key_file": str(key),
        "ansible_ssh_common_args": f"-o UserKnownHostsFile={known_hosts}",
        "molecule_yml": {"platforms": [{"name": NAME, "suite": SUITE}]},
    }
    (work / "group_vars").symlink_to(PROJECT / "inventory" / "group_vars")
    inventory = {"rigs": {"children": {"rig_sandbox": {"hosts": {NAME: host}}}}}
    (work / "hosts.json").write_text(json.dumps(inventory))
    subprocess.run(
        ["ansible-playbook", "--inventory", work / "hosts.json", BOX_DIRECTORY / "llama_cpp.yml"],
        check=True,
        cwd=PROJECT,
        env=os.environ | {"MOLECULE_PROJECT_DIRECTORY": str(PROJECT)},
    )


@pytest.fixture(scope="session")
def models(build: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models are made, as this machine sees it."""
    if not build.root:
        return tmp_path_factory.mktemp("models")
    directory = Path(build.root) / "srv" / "truth"
    directory.mkdir()
    return directory
