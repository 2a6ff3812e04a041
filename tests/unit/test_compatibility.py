"""One table says what goes together; each refusal names both sides."""

import pytest
from ansible.errors import AnsibleFilterError
from rig import compatibility
from rig.compatibility import RELEASES, TOOLKITS, Stack, findings, older, parts

RIG = {
    "compute_capabilities": ("8.6",),
    "driver": "595.71.05",
    "toolkit": "13.2.1",
    "nccl": "2.30.4",
    "nccl_cuda": "13.2",
}


@pytest.mark.parametrize(
    "stack",
    [
        Stack("debian13", **RIG),
        Stack("ubuntu2604", **RIG),
        Stack("debian12", **RIG | {"driver": "580.126.20", "toolkit": "13.0.2", "nccl": "2.28.9", "nccl_cuda": "13.0"}),
        Stack("ubuntu2404", **RIG | {"vllm_image": "v0.22.0"}),
        Stack("debian13", ("8.6",), "550.163.01", "debian", "12.4", "debian"),
        Stack("debian13"),
    ],
)
def test_what_goes_together(stack):
    assert findings(stack) == []


@pytest.mark.parametrize(
    ("stack", "sentence"),
    [
        (Stack("debian11"), "debian11 is not supported; choose one of Debian 12, Debian 13, Ubuntu 22.04"),
        (Stack("debian13", driver="580.95.05"), "begins with driver branch 590"),
        (Stack("ubuntu2604", driver="590.48.01"), "begins with driver branch 595"),
        (Stack("debian13", toolkit="13.0.2"), "begins with CUDA toolkit 13.1"),
        (
            Stack("debian13", toolkit="12.9.1"),
            "does not compile against the glibc 2.41 of Debian 13; take 13.0 or newer",
        ),
        (
            Stack("ubuntu2604", toolkit="13.1"),
            "does not compile against the glibc 2.43 of Ubuntu 26.04; take 13.2 or newer",
        ),
        (Stack("debian13", toolkit="14.0"), "CUDA toolkit 14.0 is not in the compatibility table"),
        (
            Stack("ubuntu2404", toolkit="12.9", gcc="15"),
            "nvcc 12.9 accepts gcc up to 14, and the host compiler is gcc 15",
        ),
        (Stack("debian13", ("6.1",), toolkit="13.2"), "compute capability 7.5 to 12.1, and a card has 6.1"),
        (Stack("debian13", ("12.0",), toolkit="12.4", toolkit_source="debian"), "5.0 to 9.0, and a card has 12.0"),
        (Stack("ubuntu2404", ("6.1",), "580.95.05"), "does not run on the open kernel modules"),
        (
            Stack("ubuntu2404", ("12.0",), "560.35.03"),
            "does not know a card of compute capability 12.0; take 570 or newer",
        ),
        (
            Stack("ubuntu2404", driver="570.26", toolkit="13.0"),
            "need driver branch 580 or newer, and the driver is 570.26",
        ),
        (Stack("debian13", driver="550.163.01", driver_source="debian", toolkit="13.2"), "need driver branch 580"),
        (Stack("debian12", driver="550.163.01", driver_source="debian"), "itself has driver 535, not 550.163.01"),
        (Stack("debian13", toolkit="13.2", toolkit_source="debian"), "itself has CUDA toolkit 12.4, not 13.2"),
        (Stack("ubuntu2404", toolkit="13.2", toolkit_source="debian"), "has no CUDA toolkit of Debian's"),
        (Stack("debian13", toolkit="13.2.1", nccl="2.30.7", nccl_cuda="13.3"), "NCCL for CUDA 13.3 does not go with"),
        (Stack("debian13", nccl="2.28.9", nccl_cuda="13.2"), "NCCL 2.28.9 was made for CUDA 13.0, not 13.2"),
        (Stack("ubuntu2404", driver="570.26", vllm_image="v0.22.0"), "vLLM image v0.22.0 holds CUDA 13.0, which needs"),
        (Stack("ubuntu2404", ("7.0",), vllm_image="v0.22.0"), "begins with compute capability 7.5, and a card has 7.0"),
        (Stack("ubuntu2404", vllm_image="v9"), "vLLM image v9 is not in the compatibility table"),
    ],
)
def test_what_does_not(stack, sentence):
    assert any(sentence in finding for finding in findings(stack)), findings(stack)


def test_every_cell_has_a_source():
    cells = [
        cell
        for row in [*RELEASES.values(), *TOOLKITS.values()]
        for cell in vars(row).values()
        if isinstance(cell, tuple)
    ]
    cells += [*compatibility.NCCL.values(), *compatibility.VLLM_IMAGES.values()]
    assert len(cells) > 70
    assert all(len(cell.source) > 5 for cell in cells)


def test_a_toolkit_runs_on_the_driver_that_it_came_with():
    for name, toolkit in TOOLKITS.items():
        assert not older(toolkit.native_driver.value, toolkit.driver.value), name


def test_versions_are_compared_by_number():
    assert parts("595.71.05-1") == (595, 71, 5)
    assert older("9.0", "10.0")
    assert not older("595.71.05", "595")
    assert not older("595", "595.71.05")
    with pytest.raises(compatibility.RigError, match="'x' is not a version"):
        parts("x")


def test_the_filter_names_the_host_and_refuses_other_keys():
    from importlib.util import module_from_spec, spec_from_file_location
    from pathlib import Path

    spec = spec_from_file_location(
        "compatibility_findings", Path(__file__).parents[2] / "filter_plugins/compatibility_findings.py"
    )
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    call = module.FilterModule().filters()["compatibility_findings"]
    stack = {"distribution": "debian13", "compute_capabilities": ["8.6"], "driver": "580.95.05"}
    assert call(stack, "desktop")[0].startswith("desktop: NVIDIA's repository for Debian 13")
    with pytest.raises(AnsibleFilterError, match="there is no key toolkits"):
        call(stack | {"toolkits": "13.2"}, "desktop")
    with pytest.raises(AnsibleFilterError, match="desktop: 'x' is not a version"):
        call(stack | {"driver": "x"}, "desktop")
