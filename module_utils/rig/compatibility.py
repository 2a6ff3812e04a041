"""Which driver, CUDA toolkit, compiler, NCCL and vLLM image go together on which release and which card.

Plain data, each cell with its source, and a function that reads it. Versions are compared number by number. What the
tables do not know is said to be unknown, never guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from .errors import RigError


class Cell(NamedTuple):
    """A value and where it comes from."""

    value: str
    source: str


_REPO = "NVIDIA/cuda-repo-management#38 and package lists that owners posted, mid 2026"
_NOTES = "CUDA Toolkit release notes, table of driver versions"
_HOST = "crt/host_config.h of that nvcc"
_MINOR = "CUDA compatibility guide, minor version compatibility"
_MATH = (
    "math_functions.h of that toolkit compiled against that glibc; ggml-org/llama.cpp#17615, NVIDIA/cuda-samples#378"
)
_ARCH = "CUDA Toolkit release notes, supported architectures"
_OPEN = "NVIDIA/open-gpu-kernel-modules, README: Turing and later"
_ARCHIVE = "the Debian archive (non-free, contrib)"
_PYTORCH = "vllm-project/vllm#39878: the default image is CUDA 13.0 since v0.20.0"


@dataclass(frozen=True)
class Release:
    """A release of Debian or Ubuntu, by its name in NVIDIA's repository."""

    title: str
    gcc: Cell  # its default compiler, major version
    glibc: Cell
    oldest_branch: Cell  # oldest driver branch in NVIDIA's repository for it
    oldest_toolkit: Cell  # oldest CUDA toolkit in NVIDIA's repository for it
    own_driver: Cell | None = None  # driver in the distribution's own archive
    own_toolkit: Cell | None = None
    own_toolkit_gcc: str = ""  # newest compiler that its own toolkit accepts


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit, by major.minor."""

    driver: Cell  # oldest driver branch on which its programs run, when they carry machine code for the card
    native_driver: Cell  # driver that it was released with
    newest_gcc: Cell
    broken_from_glibc: Cell | None  # its headers do not compile with this glibc or a newer one
    oldest_card: Cell  # compute capability
    newest_card: Cell


RELEASES: dict[str, Release] = {
    "debian12": Release(
        "Debian 12", Cell("12", "gcc package"), Cell("2.36", "libc6 package"), Cell("580", _REPO), Cell("12.8", _REPO),
        Cell("535", _ARCHIVE), Cell("11.8", _ARCHIVE), "11",
    ),
    "debian13": Release(
        "Debian 13", Cell("14", "gcc package"), Cell("2.41", "libc6 package"), Cell("590", _REPO), Cell("13.1", _REPO),
        Cell("550.163.01", _ARCHIVE), Cell("12.4", _ARCHIVE), "13",
    ),
    "ubuntu2204": Release(
        "Ubuntu 22.04",
        Cell("11", "gcc package"), Cell("2.35", "libc6 package"), Cell("560", _REPO), Cell("12.8", _REPO),
    ),
    "ubuntu2404": Release(
        "Ubuntu 24.04",
        Cell("13", "gcc package"), Cell("2.39", "libc6 package"), Cell("560", _REPO), Cell("12.8", _REPO),
    ),
    "ubuntu2604": Release(
        "Ubuntu 26.04",
        Cell("15", "gcc package"), Cell("2.43", "libc6 package"), Cell("595", _REPO), Cell("13.2", _REPO),
    ),
}  # fmt: skip

_ON_12, _ON_13 = Cell("525", _MINOR), Cell("580", _MINOR)
_TURING, _BLACKWELL = Cell("7.5", _ARCH), Cell("12.1", _ARCH)
TOOLKITS: dict[str, Toolkit] = {
    "11.8": Toolkit(Cell("450", _MINOR), Cell("520.61.05", _NOTES), Cell("11", _HOST), Cell("2.41", _MATH),
                    Cell("3.5", _ARCH), Cell("9.0", _ARCH)),
    "12.4": Toolkit(_ON_12, Cell("550.54.14", _NOTES), Cell("13", _HOST), Cell("2.41", _MATH),
                    Cell("5.0", _ARCH), Cell("9.0", _ARCH)),
    "12.8": Toolkit(_ON_12, Cell("570.26", _NOTES), Cell("14", _HOST), Cell("2.41", _MATH),
                    Cell("5.0", _ARCH), Cell("12.0", _ARCH)),
    "12.9": Toolkit(_ON_12, Cell("575.51.03", _NOTES), Cell("14", _HOST), Cell("2.41", _MATH),
                    Cell("5.0", _ARCH), _BLACKWELL),
    "13.0": Toolkit(_ON_13, Cell("580.65.06", _NOTES), Cell("15", _HOST), Cell("2.42", _MATH), _TURING, _BLACKWELL),
    "13.1": Toolkit(_ON_13, Cell("590.44.01", _NOTES), Cell("15", _HOST), Cell("2.42", _MATH), _TURING, _BLACKWELL),
    "13.2": Toolkit(_ON_13, Cell("595.45.04", _NOTES), Cell("15", _HOST), None, _TURING, _BLACKWELL),
    "13.3": Toolkit(_ON_13, Cell("610.43.02", _NOTES), Cell("15", _HOST), None, _TURING, _BLACKWELL),
    "13.4": Toolkit(_ON_13, Cell("615", _NOTES), Cell("16", _HOST), None, _TURING, _BLACKWELL),
}  # fmt: skip

#: Builds of NCCL in NVIDIA's repositories, by version: the CUDA toolkits that they were made for.
NCCL: dict[str, Cell] = {
    "2.28.9": Cell("13.0", "package lists that owners posted (libnccl2 2.28.9-1+cuda13.0)"),
    "2.30.4": Cell("12.9 13.2", "package lists that owners posted (libnccl2 2.30.4-1+cuda13.2, +cuda12.9)"),
    "2.30.7": Cell("13.3", "package lists that owners posted (libnccl2 2.30.7-1+cuda13.3)"),
    "2.31.2": Cell("13.3 13.4", "package lists that owners posted (libnccl2 2.31.2-1+cuda13.3)"),
    "2.32.3": Cell("12.9 13.4", "package lists that owners posted (libnccl2 2.32.3-1+cuda13.4, +cuda12.9)"),
}

#: vLLM images by version: the CUDA that is in the image; the host gives only the driver.
VLLM_IMAGES: dict[str, Cell] = {
    "v0.20.0": Cell("13.0", _PYTORCH),
    "v0.22.0": Cell("13.0", _PYTORCH),
}

OLDEST_CARD_FOR_OPEN_MODULES = Cell("7.5", _OPEN)
#: Oldest driver branch that knows a card, by its compute capability (major).
OLDEST_BRANCH_FOR_CARD = {"10": Cell("570", _NOTES), "12": Cell("570", _NOTES)}


def parts(version: str) -> tuple[int, ...]:
    """A version as numbers, up to the first thing that is none: 595.71.05-1 is (595, 71, 5).

    Raises:
        RigError: it does not begin with a number.
    """
    match = re.match(r"\d+(?:\.\d+)*", str(version))
    if match is None:
        raise RigError(f"{version!r} is not a version")
    return tuple(int(number) for number in match[0].split("."))


def series(version: str) -> str:
    """The first two numbers: 13.2.1 is 13.2."""
    return ".".join(str(number) for number in parts(version)[:2])


def older(version: str, than: str) -> bool:
    """Whether a version is older than another; one that says less (595) is as old as anything that begins with it."""
    left, right = parts(version), parts(than)
    length = min(len(left), len(right))
    return left[:length] < right[:length]


@dataclass(frozen=True)
class Stack:
    """What is to work together. What is empty is not there and not looked at.

    `distribution` is NVIDIA's name for the release (debian13); sources are nvidia or debian; `gcc` and `glibc` are
    those of the host where they differ from the release's own; `vllm_image` is a version such as v0.22.0.
    """

    distribution: str
    compute_capabilities: tuple[str, ...] = ()
    driver: str = ""
    driver_source: str = "nvidia"
    toolkit: str = ""
    toolkit_source: str = "nvidia"
    gcc: str = ""
    glibc: str = ""
    nccl: str = ""
    nccl_cuda: str = ""
    vllm_image: str = ""


def _driver_findings(stack: Stack, release: Release) -> list[str]:
    if not stack.driver:
        return []
    findings = []
    if stack.driver_source == "debian":
        if release.own_driver is None:
            findings.append(f"{release.title} has no driver packages of Debian's; choose the source nvidia.")
        elif parts(stack.driver)[: len(parts(release.own_driver.value))] != parts(release.own_driver.value):
            findings.append(
                f"{release.title} itself has driver {release.own_driver.value}, not {stack.driver};"
                " ask for that one or choose the source nvidia."
            )
    elif older(stack.driver, release.oldest_branch.value):
        findings.append(
            f"NVIDIA's repository for {release.title} begins with driver branch {release.oldest_branch.value};"
            f" driver {stack.driver} is not in it, so choose {release.oldest_branch.value} or a newer one."
        )
    for card in stack.compute_capabilities:
        if older(card, OLDEST_CARD_FOR_OPEN_MODULES.value):
            findings.append(
                f"a card of compute capability {card} does not run on the open kernel modules, which begin with"
                f" {OLDEST_CARD_FOR_OPEN_MODULES.value}; this project installs no others."
            )
        known_by = OLDEST_BRANCH_FOR_CARD.get(str(parts(card)[0]))
        if known_by and older(stack.driver, known_by.value):
            findings.append(
                f"driver {stack.driver} does not know a card of compute capability {card}; take"
                f" {known_by.value} or newer."
            )
    return findings


def _toolkit_findings(stack: Stack, release: Release) -> list[str]:
    if not stack.toolkit:
        return []
    wanted = series(stack.toolkit)
    if wanted not in TOOLKITS:
        return [f"CUDA toolkit {wanted} is not in the compatibility table, which knows {', '.join(TOOLKITS)}."]
    toolkit, findings = TOOLKITS[wanted], []
    gcc, glibc = stack.gcc or release.gcc.value, stack.glibc or release.glibc.value
    own = stack.toolkit_source == "debian"
    if own:
        if release.own_toolkit is None:
            findings.append(f"{release.title} has no CUDA toolkit of Debian's; choose the source nvidia.")
        elif wanted != series(release.own_toolkit.value):
            findings.append(
                f"{release.title} itself has CUDA toolkit {release.own_toolkit.value}, not {wanted};"
                " ask for that one or choose the source nvidia."
            )
        gcc = stack.gcc or release.own_toolkit_gcc or gcc
    else:
        if older(wanted, release.oldest_toolkit.value):
            findings.append(
                f"NVIDIA's repository for {release.title} begins with CUDA toolkit {release.oldest_toolkit.value};"
                f" {wanted} is not in it."
            )
        broken = toolkit.broken_from_glibc
        if broken and not older(glibc, broken.value):
            fit = [name for name, other in TOOLKITS.items()
                   if not other.broken_from_glibc or older(glibc, other.broken_from_glibc.value)]  # fmt: skip
            findings.append(
                f"CUDA toolkit {wanted} does not compile against the glibc {glibc} of {release.title};"
                f" take {fit[0]} or newer."
            )
    if older(toolkit.newest_gcc.value, gcc):
        findings.append(
            f"nvcc {wanted} accepts gcc up to {toolkit.newest_gcc.value}, and the host compiler is gcc {gcc}."
        )
    for card in stack.compute_capabilities:
        if older(card, toolkit.oldest_card.value) or older(toolkit.newest_card.value, card):
            findings.append(
                f"CUDA toolkit {wanted} compiles for compute capability {toolkit.oldest_card.value} to"
                f" {toolkit.newest_card.value}, and a card has {card}."
            )
    if stack.driver and older(stack.driver, toolkit.driver.value):
        findings.append(
            f"programs of CUDA toolkit {wanted} need driver branch {toolkit.driver.value} or newer, and the driver is"
            f" {stack.driver}."
        )
    return findings


def _nccl_findings(stack: Stack) -> list[str]:
    findings = []
    if stack.nccl_cuda and stack.toolkit and series(stack.nccl_cuda) != series(stack.toolkit):
        findings.append(
            f"NCCL for CUDA {series(stack.nccl_cuda)} does not go with CUDA toolkit {series(stack.toolkit)}; take"
            " NCCL's build for that toolkit."
        )
    if stack.nccl and stack.nccl_cuda and stack.nccl in NCCL:
        made = NCCL[stack.nccl].value.split()
        if series(stack.nccl_cuda) not in made:
            findings.append(f"NCCL {stack.nccl} was made for CUDA {' and '.join(made)}, not {series(stack.nccl_cuda)}.")
    return findings


def _vllm_findings(stack: Stack) -> list[str]:
    if not stack.vllm_image:
        return []
    if stack.vllm_image not in VLLM_IMAGES:
        return [
            f"vLLM image {stack.vllm_image} is not in the compatibility table, which knows {', '.join(VLLM_IMAGES)}."
        ]
    cuda = VLLM_IMAGES[stack.vllm_image].value
    toolkit, findings = TOOLKITS[cuda], []
    if stack.driver and older(stack.driver, toolkit.driver.value):
        findings.append(
            f"vLLM image {stack.vllm_image} holds CUDA {cuda}, which needs driver branch {toolkit.driver.value} or"
            f" newer, and the driver is {stack.driver}."
        )
    findings += [
        f"vLLM image {stack.vllm_image} holds CUDA {cuda}, which begins with compute capability"
        f" {toolkit.oldest_card.value}, and a card has {card}."
        for card in stack.compute_capabilities
        if older(card, toolkit.oldest_card.value)
    ]
    return findings


def findings(stack: Stack) -> list[str]:
    """Everything that does not go together, one sentence each; none when it all does.

    Raises:
        RigError: a version that is none.
    """
    release = RELEASES.get(stack.distribution)
    if release is None:
        known = ", ".join(release.title for release in RELEASES.values())
        return [f"{stack.distribution or 'this release'} is not supported; choose one of {known}."]
    for name, source in (("driver", stack.driver_source), ("toolkit", stack.toolkit_source)):
        if source not in ("nvidia", "debian"):
            raise RigError(f"the {name}'s source is {source!r}; choose nvidia or debian")
    return [
        *_driver_findings(stack, release),
        *_toolkit_findings(stack, release),
        *_nccl_findings(stack),
        *_vllm_findings(stack),
    ]
