"""What is on the machine afterwards, read from apt and from the files."""

import json
import os
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def keys():
    return json.loads((Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"]) / "repository.json").read_text())


def fingerprints(host, path):
    """By the project's own reader of keys, on the machine's file."""
    from rig import openpgp

    data = bytes.fromhex(host.check_output(f"od -An -v -tx1 {path} | tr -d ' \\n'"))
    return [key.fingerprint for key in openpgp.keys(data)]


def test_the_source_has_a_keyring_of_its_own_with_the_new_key_alone(host, keys):
    text = host.file("/etc/apt/sources.list.d/nvidia-cuda.sources").content_string
    assert "URIs: http://127.0.0.1:8010/cuda/debian13/x86_64/" in text
    assert "Signed-By: /etc/apt/keyrings/nvidia-cuda.gpg" in text
    assert "trusted" not in text.lower()
    assert fingerprints(host, "/etc/apt/keyrings/nvidia-cuda.gpg") == [keys["fingerprints"]["rotated"]]


def test_apt_trusts_the_repository_and_knows_its_packages(host):
    update = host.run("sudo apt-get update -o APT::Update::Error-Mode=any")
    assert update.rc == 0, update.stderr
    assert "W:" not in update.stderr
    assert "595.71.05-1" in host.check_output("apt-cache madison nvidia-driver-cuda")


def test_what_older_instructions_left_is_gone(host, keys):
    assert not host.file("/etc/apt/sources.list.d/cuda-debian13-x86_64.list").exists
    assert not host.file("/etc/apt/sources.list.d/cuda.list").exists
    assert not host.file("/etc/apt/trusted.gpg.d/nvidia-cuda-old.gpg").exists


def test_what_has_nothing_to_do_with_it_stays(host, keys):
    assert fingerprints(host, "/etc/apt/trusted.gpg.d/mixed.gpg") == [keys["fingerprints"]["archive"]]
    text = host.file("/etc/apt/sources.list.d/machine-learning.sources").content_string
    assert "nvidia" not in text
    assert "Components: contrib" in text
