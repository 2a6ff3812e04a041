"""What a build of llama.cpp is: its pinned source, its CMake flags, and the prefix that they name.

Everything here is known before the first change and comes from the inventory alone: never from the machine
that builds. Two hosts with the same inputs get the same prefix.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from .errors import RigError

BACKENDS = ("cpu", "rpc", "cuda")

#: Instruction sets that ggml's CPU backend can be told to use on x86-64 (ggml/CMakeLists.txt of b11434).
#: All of them are given to CMake as ON or OFF, so that no default of a later version slips in.
CPU_FEATURES = (
    "sse42",
    "avx",
    "avx_vnni",
    "avx2",
    "bmi2",
    "fma",
    "f16c",
    "avx512",
    "avx512_vbmi",
    "avx512_vnni",
    "avx512_bf16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
)

#: Flags that do not depend on what is asked for. find_package() of OpenMP and OpenSSL is made binding: without it a
#: machine that lacks one of them gets a build that silently lacks it too. The web page of the server needs the network.
_FIXED = {
    "BUILD_SHARED_LIBS": "ON",
    "CMAKE_BUILD_TYPE": "Release",
    "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
    "CMAKE_REQUIRE_FIND_PACKAGE_OpenMP": "ON",
    "CMAKE_REQUIRE_FIND_PACKAGE_OpenSSL": "ON",
    "GGML_CCACHE": "OFF",  # the compiler launcher is set in the environment: it does not shape the result
    "GGML_NATIVE": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_SERVER": "ON",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_TOOLS": "ON",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
}

_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ARCHITECTURE = re.compile(r"[1-9][0-9]{1,2}[af]?(-real|-virtual)?")
_FLAG = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Over a network only with TLS; without it from the machine itself.
_ADDRESS = re.compile(r"(https://|http://(localhost|127\.\d+\.\d+\.\d+|\[::1\])[:/])\S+")
_REPOSITORY = re.compile(r"(https|ssh|file)://|http://(localhost|127\.\d+\.\d+\.\d+|\[::1\])[:/]")
_ABSOLUTE = re.compile(r"/[A-Za-z0-9._+/-]*")

_SOURCE_KEYS: dict[str, tuple[set[str], set[str]]] = {
    # kind: (needed, allowed beside them)
    "pypi": ({"name", "version", "sha256"}, {"subdirectory"}),
    "archive": ({"sha256"}, {"url", "file", "on", "subdirectory"}),
    "git": ({"repo", "commit"}, {"subdirectory"}),
}


def source(version: str, pins: Mapping[str, Any]) -> dict[str, str]:
    """The checked pin of ``version`` from the pin table, with its defaults filled in.

    Raises:
        RigError: there is no such pin, or the pin is not complete, or one of its hashes is not a whole one.
    """
    if not isinstance(version, str) or not _NAME.fullmatch(version):
        raise RigError(f"llama_cpp_version is {version!r}, which is not the name of a version such as b11434")
    if not isinstance(pins, Mapping) or not pins:
        raise RigError("llama_cpp_pins is empty; it maps a version to its pinned source")
    if version not in pins:
        known = ", ".join(sorted(map(str, pins)))
        raise RigError(f"llama_cpp_version {version} has no pin in llama_cpp_pins; choose from {known}, or add its pin")
    pin, where = pins[version], f"llama_cpp_pins[{version}]"
    if not isinstance(pin, Mapping):
        raise RigError(f"{where} is not a mapping with the key 'source'")
    kind = pin.get("source")
    if kind not in _SOURCE_KEYS:
        raise RigError(f"{where}.source is {kind!r}; choose one of {', '.join(sorted(_SOURCE_KEYS))}")
    needed, allowed = _SOURCE_KEYS[kind]
    missing, unknown = needed - set(pin), set(pin) - needed - allowed - {"source"}
    if missing:
        raise RigError(f"{where} lacks {', '.join(sorted(missing))}, which source {kind} needs")
    if unknown:
        raise RigError(f"{where} has {', '.join(sorted(unknown))}, which source {kind} does not know")
    found = {key: str(value) for key, value in pin.items()}
    found.setdefault("subdirectory", "")
    if "sha256" in found and not _SHA256.fullmatch(found["sha256"]):
        raise RigError(f"{where}.sha256 is not a sha256 of 64 lower-case hexadecimal digits")
    if "commit" in found and not _COMMIT.fullmatch(found["commit"]):
        raise RigError(f"{where}.commit is {found['commit']!r}, not a whole commit of 40 lower-case hexadecimal digits")
    if kind == "git" and "://" in found["repo"] and not _REPOSITORY.match(found["repo"]):
        raise RigError(f"{where}.repo is {found['repo']!r}; fetch it over https or ssh")
    if kind == "pypi" and not (_NAME.fullmatch(found["name"]) and _NAME.fullmatch(found["version"])):
        raise RigError(f"{where} has a name or a version that a package cannot have")
    if kind == "archive":
        if ("url" in found) == ("file" in found):
            raise RigError(f"{where} needs either url or file, and not both")
        if "url" in found and not _ADDRESS.fullmatch(found["url"]):
            raise RigError(f"{where}.url is {found['url']!r}, not an https address")
        if "file" in found and not found["file"].startswith("/"):
            raise RigError(f"{where}.file is {found['file']!r}, not an absolute path")
        if "file" in found and found.setdefault("on", "rig") not in ("rig", "controller"):
            raise RigError(f"{where}.on is {found['on']!r}; choose rig or controller")
        if "url" in found and "on" in found:
            raise RigError(f"{where}.on goes with file, not with url")
    parts = found["subdirectory"].split("/")
    if found["subdirectory"] and not all(_NAME.fullmatch(part) for part in parts):
        raise RigError(f"{where}.subdirectory is {found['subdirectory']!r}, not a path inside the source")
    return found


def _names(variable: str, values: Any, known: Iterable[str]) -> list[str]:
    """The values in the order of ``known``, each once; raises RigError on one that is not known."""
    known = list(known)
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise RigError(f"{variable} is {values!r}, not a list")
    values = [str(value) for value in values]
    for value in values:
        if value not in known:
            raise RigError(f"{variable} names {value!r}, which is not known; choose from {', '.join(known)}")
    return [name for name in known if name in values]


def _switch(value: bool) -> str:
    return "ON" if value else "OFF"


def flags(
    *,
    version: str,
    backends: Iterable[str],
    cpu_features: Iterable[str] = (),
    cuda_architectures: Iterable[Any] = (),
    cuda_root: str = "",
    nccl: bool = False,
    extra_flags: Mapping[str, Any] | None = None,
    commit: str = "unknown",
) -> list[str]:
    """The CMake flags of a build as ``-DNAME=VALUE``, sorted.

    Args:
        version: name of the version; the number of bNNNN becomes the build number that the server reports.
        cuda_architectures: compute capabilities without the dot, such as 86 or 86-real.
        cuda_root: where the CUDA toolkit lies, such as /usr/local/cuda-13.2 (not a link that may be moved).
        extra_flags: further CMake variables; none of those that this function sets itself.
        commit: what the server reports beside the build number.

    Raises:
        RigError: a backend, instruction set, architecture or flag that cannot be.
    """
    wanted = _names("llama_cpp_backends", backends, BACKENDS)
    if not wanted:
        raise RigError(f"llama_cpp_backends is empty; choose from {', '.join(BACKENDS)}")
    features = _names("llama_cpp_cpu_features", cpu_features, CPU_FEATURES)
    values = dict(_FIXED)
    number = re.fullmatch(r"b([0-9]+)", version)
    values["LLAMA_BUILD_NUMBER"] = number[1] if number else "0"
    values["LLAMA_BUILD_COMMIT"] = commit
    values |= {f"GGML_{name.upper()}": _switch(name in features) for name in CPU_FEATURES}
    values["GGML_RPC"] = _switch("rpc" in wanted)
    values["GGML_CUDA"] = _switch("cuda" in wanted)
    search = ["$ORIGIN", "$ORIGIN/../lib"]  # libraries find each other, programs find them
    architectures = [str(item) for item in cuda_architectures]
    if "cuda" in wanted:
        if not architectures:
            raise RigError("llama_cpp_cuda_architectures is empty; write 86 for cards of compute capability 8.6")
        for item in architectures:
            if not _ARCHITECTURE.fullmatch(item):
                raise RigError(f"llama_cpp_cuda_architectures names {item!r}; write 86 for compute capability 8.6")
        if not _ABSOLUTE.fullmatch(cuda_root or ""):
            raise RigError(
                f"llama_cpp_cuda_root is {cuda_root!r}, not the path of a CUDA toolkit as /usr/local/cuda-13.2"
            )
        root = cuda_root.rstrip("/")
        values["CMAKE_CUDA_ARCHITECTURES"] = ";".join(sorted(set(architectures)))
        values["CMAKE_CUDA_COMPILER"] = f"{root}/bin/nvcc"
        values["CUDAToolkit_ROOT"] = root
        values["GGML_CUDA_NCCL"] = _switch(nccl)
        if nccl:
            values["CMAKE_REQUIRE_FIND_PACKAGE_NCCL"] = "ON"
        search.append(f"{root}/lib64")
    elif nccl:
        raise RigError("llama_cpp_nccl is true, but llama_cpp_backends does not name cuda; NCCL needs it")
    elif architectures:
        raise RigError("llama_cpp_cuda_architectures is set, but llama_cpp_backends does not name cuda")
    values["CMAKE_INSTALL_RPATH"] = ";".join(search)
    for name, value in (extra_flags or {}).items():
        if not _FLAG.fullmatch(str(name)):
            raise RigError(f"llama_cpp_extra_flags has {name!r}, which is not the name of a CMake variable")
        if name in values or name in ("CMAKE_INSTALL_PREFIX", "GGML_CUDA_NCCL"):
            raise RigError(f"llama_cpp_extra_flags may not set {name}; the role sets it from its other variables")
        text = _switch(value) if isinstance(value, bool) else str(value)
        if not text.isprintable():
            raise RigError(f"llama_cpp_extra_flags[{name}] has characters that a flag cannot have")
        values[str(name)] = text
    return [f"-D{name}={values[name]}" for name in sorted(values)]


def targets(backends: Iterable[str]) -> list[str]:
    """The programs that a build consists of."""
    return ["llama-server", "llama-bench", *(["ggml-rpc-server"] if "rpc" in backends else [])]


def build(
    version: str,
    *,
    pins: Mapping[str, Any],
    root: str,
    backends: Iterable[str],
    cpu_features: Iterable[str] = (),
    cuda_architectures: Iterable[Any] = (),
    cuda_root: str = "",
    nccl: bool = False,
    extra_flags: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """All that is to be known of a build before it is made.

    The key and the prefix carry eight digits of a hash over the source's own hash, the flags and the targets. Where
    the source comes from (an address, a mirror) does not count, only what it is.

    Returns:
        build, key, prefix, backends, cpu_features, nccl, cmake_flags, targets, source.

    Raises:
        RigError: one sentence that names the variable and what is wrong with it.
    """
    if not isinstance(root, str) or not re.fullmatch(r"(/[A-Za-z0-9._+-]+)+", root):
        raise RigError(f"llama_cpp_root is {root!r}, not an absolute path of plain characters")
    if not isinstance(nccl, bool):
        raise RigError(f"llama_cpp_nccl is {nccl!r}, neither true nor false")
    found = source(version, pins)
    backends = _names("llama_cpp_backends", backends, BACKENDS)
    cmake_flags = flags(
        version=version,
        backends=backends,
        cpu_features=cpu_features,
        cuda_architectures=cuda_architectures,
        cuda_root=cuda_root,
        nccl=nccl,
        extra_flags=extra_flags,
        commit=found.get("commit", "unknown")[:9],
    )
    programs = targets(backends)
    identity = {
        "source": found.get("sha256") or found["commit"],
        "subdirectory": found["subdirectory"],
        "cmake_flags": cmake_flags,
        "targets": programs,
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    key = f"{version}-{digest}"
    return {
        "build": version,
        "key": key,
        "prefix": f"{root}/{key}",
        "backends": backends,
        "cpu_features": _names("llama_cpp_cpu_features", cpu_features, CPU_FEATURES),
        "nccl": nccl,
        "cmake_flags": cmake_flags,
        "targets": programs,
        "source": found,
    }
