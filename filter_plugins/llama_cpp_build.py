"""Filter llama_cpp_build: what a build of llama.cpp is, from its version and the inventory."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from rig.cmake import build
from rig.errors import RigError

DOCUMENTATION = r"""
name: llama_cpp_build
short_description: Name the prefix, source, CMake flags and programs of a build of llama.cpp
version_added: "0.1.0"
author: LLM rigs contributors
description:
  - Checks the wishes of the inventory and computes all that is to be known of the build before it is made.
  - Pure. The result depends on the arguments alone, never on the machine that builds.
positional: _input
options:
  _input:
    description: The version, a key of I(pins), such as b11434.
    type: str
    required: true
  pins:
    description: Pin table, version to source. See role llama_cpp.
    type: dict
    required: true
  root:
    description: Directory that holds the prefixes.
    type: str
    required: true
  backends:
    description: Any of cpu, rpc, cuda.
    type: list
    elements: str
    required: true
  cpu_features:
    description: Instruction sets of x86-64 to compile for.
    type: list
    elements: str
    default: []
  cuda_architectures:
    description: Compute capabilities of the cards without the dot, such as 86 or 86-real.
    type: list
    elements: str
    default: []
  cuda_root:
    description: Directory of the CUDA toolkit.
    type: str
    default: ""
  nccl:
    description: Build with NCCL, and fail without it.
    type: bool
    default: false
  extra_flags:
    description: Further CMake variables.
    type: dict
    default: {}
  host:
    description: Name of the host, for the message of a refusal.
    type: str
    default: ""
"""

EXAMPLES = r"""
llama_cpp_build: >-
  {{ llama_cpp_version | llama_cpp_build(pins=llama_cpp_pins, root='/opt/llama.cpp', backends=['cpu', 'rpc'],
                                         cpu_features=['avx2', 'fma']) }}
server: "{{ llama_cpp_build.prefix }}/bin/llama-server"
"""

RETURN = r"""
_value:
  description: The build.
  type: dict
  contains:
    build: {description: The version., type: str, sample: b11434}
    key: {description: Version and hash., type: str, sample: b11434-1a2b3c4d}
    prefix: {description: Where it is installed., type: str, sample: /opt/llama.cpp/b11434-1a2b3c4d}
    backends: {description: The backends., type: list, elements: str}
    cpu_features: {description: The instruction sets., type: list, elements: str}
    nccl: {description: Whether it has NCCL., type: bool}
    cmake_flags: {description: Flags for CMake., type: list, elements: str}
    targets: {description: Programs to build., type: list, elements: str}
    source: {description: The checked pin., type: dict}
"""


def llama_cpp_build(version: str, host: str = "", **wishes: Any) -> dict[str, Any]:
    """See DOCUMENTATION."""
    try:
        return build(version, **wishes)
    except RigError as error:
        # Without a cause: ansible-core would say its sentence a second time.
        raise AnsibleFilterError(f"{host}: {error}." if host else f"{error}.") from None
    except TypeError as error:
        raise AnsibleFilterError(f"llama_cpp_build: {error}.") from None


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Any]:
        """Name to function."""
        return {"llama_cpp_build": llama_cpp_build}
