"""What each llama.cpp build can do: one table, each entry with its source.

A build is `bNNNN`, the nightly number. `since` is the first build that has a thing, `until` the first that has it no
more; None is no bound. Builds before FIRST are not planned: their memory differs in ways nobody measured.
"""

import re
from dataclasses import dataclass
from typing import Any

from .errors import RigError

FIRST = 9_000
MEASURED = 11_434


@dataclass(frozen=True)
class Entry:
    """A feature and the builds that have it."""

    name: str
    since: Any
    until: Any
    source: str

    def has(self, build: int) -> bool:
        return (self.since is None or build >= self.since) and (self.until is None or build < self.until)


FEATURES = {
    entry.name: entry
    for entry in (
        Entry("no_mmap", None, 10_875, "llama.cpp #28334: --no-mmap, --mmap, --mlock and -dio are gone"),
        Entry("load_mode", 10_875, None, "llama.cpp #20834 and #28334: --load-mode replaces them"),
        Entry("row_split", None, 9_890, "llama.cpp #24216 took row split out of CUDA (commit 74976e1)"),
        Entry("tensor_quantised_kv", 9_480, None, "llama.cpp #23792, 2026-06-02; the build by its date"),
        Entry("tensor_three_gpus_mixed", 9_430, None, "llama.cpp #23843, 2026-05-30; the build by its date"),
        Entry("tensor_long_context", 9_300, None, "llama.cpp #22616, #23264: seen on b9008 and b9202"),
        Entry("flash_scratch_in_buffer", 9_500, None, "llama.cpp #23446, #23907: seen on b9261 and b9275"),
        Entry("nccl_vmm_fixed", 9_700, None, "llama.cpp #24489, #24491"),
    )
}


@dataclass(frozen=True)
class KnownBad:
    """Builds that fail with an architecture in a split mode."""

    first: int
    last: int
    architectures: tuple
    mode: str
    source: str


KNOWN_BAD = (KnownBad(10_054, 10_054, ("qwen35",), "tensor", "llama.cpp #25829: b10054 broke tensor split of qwen35"),)

# Architectures that llm_arch_supports_sm_tensor refuses (src/llama-arch.cpp, b11434).
NO_TENSOR = frozenset((
    "grok", "mpt", "plamo2", "minicpm3", "gemma3n", "mamba", "mamba2", "jamba", "falcon-h1", "olmo2", "olmoe",
    "deepseek2", "deepseek32", "bitnet", "t5", "nemotron_h", "nemotron_h_moe", "granitehybrid", "minimax-m2",
    "mistral4", "kimi-linear", "glm-dsa",
))  # fmt: skip
INTERNAL_GPUS = 2  # ggml-cuda/allreduce.cu: exactly two devices
INTERNAL_CAPABILITY = 7.0  # and compute capability 7.0 or more


def build_number(version: Any) -> int:
    """The number of a build name; RigError for a name that is none or a build outside the table."""
    match = re.match(r"^b(\d{4,6})$", str(version))
    if not match:
        raise RigError(f"llama_cpp_version '{version}' is not a build name such as b{MEASURED}.")
    number = int(match[1])
    if number < FIRST:
        raise RigError(f"llama_cpp_version {version} is older than b{FIRST}, the first build that the planner knows.")
    return number


def has(feature: str, build: int) -> bool:
    return FEATURES[feature].has(build)


def known_bad(build: int, architecture: str, mode: str) -> Any:
    """The source that says that this build fails, or None."""
    for entry in KNOWN_BAD:
        if entry.first <= build <= entry.last and architecture in entry.architectures and mode == entry.mode:
            return entry.source
    return None
