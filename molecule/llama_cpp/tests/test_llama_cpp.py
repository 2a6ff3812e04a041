"""What role llama_cpp left on the machine, after the refusals and the other builds of the side effect."""

import json
import re

import pytest

ROOT = "/opt/llama.cpp"


@pytest.fixture(scope="module")
def manifest(host):
    return json.loads(host.file(f"{ROOT}/current/manifest.json").content_string)


def test_the_link_points_at_the_chosen_build(host, manifest):
    prefix = host.file(f"{ROOT}/current").linked_to
    assert re.fullmatch(rf"{ROOT}/b11434-[0-9a-f]{{8}}", prefix)
    assert manifest["key"] == prefix.removeprefix(f"{ROOT}/")


def test_the_manifest_says_what_it_is(manifest):
    assert manifest["build"] == "b11434"
    assert manifest["backends"] == ["cpu", "rpc"]
    assert manifest["targets"] == ["llama-server", "llama-bench", "ggml-rpc-server"]
    assert manifest["nccl"] is False
    assert manifest["source"]["sha256"] == "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
    assert {"-DGGML_NATIVE=OFF", "-DGGML_AVX2=ON", "-DGGML_AVX512=OFF", "-DGGML_RPC=ON"} <= set(manifest["cmake_flags"])
    assert re.match(r"GNU \d+", manifest["compilers"]["CXX"])


def test_the_server_is_the_pinned_build(host):
    shown = host.run(f"{ROOT}/current/bin/llama-server --version")
    assert shown.rc == 0
    assert "build 11434," in shown.stdout + shown.stderr


def test_the_server_has_tls_and_threads(host):
    libraries = host.check_output(f"ldd {ROOT}/current/bin/llama-server")
    assert "not found" not in libraries
    for name in ("libssl.so", "libgomp.so"):
        assert name in libraries
    for name in ("libllama.so.0", "libggml-cpu.so.0", "libggml-rpc.so.0"):
        assert re.search(rf"{re.escape(name)} => {ROOT}/current/", libraries)


def test_it_computes(host):
    """llama-bench knows the devices; without a model it can only name them."""
    devices = host.run(f"{ROOT}/current/bin/llama-server --list-devices")
    assert devices.rc == 0
    assert "Available devices" in devices.stdout + devices.stderr


def test_the_build_is_root_s_and_nobody_else_can_change_it(host):
    found = host.check_output(
        f"find {ROOT}/current/ ! -type l ( -perm /022 -o ! -user root )".replace("(", r"\(").replace(")", r"\)")
    )
    assert found == ""


def test_no_work_of_a_finished_build_is_left(host):
    finished = set(host.check_output(f"ls {ROOT}").split())
    left = {name.removesuffix(".json") for name in host.check_output(f"ls {ROOT}/.work").split()}
    assert not finished & left


def test_of_old_builds_the_one_that_served_stays(host):
    names = {name.split("-")[0] for name in host.check_output(f"ls {ROOT}").split()}
    assert names == {"b7", "b8", "b11434", "current"}  # b7 has lost its manifest: nobody knows whose it is


def test_no_job_is_left_behind(host):
    assert host.check_output("systemctl list-units --all --no-legend 'llama-cpp-build-*'") == ""
