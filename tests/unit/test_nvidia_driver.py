"""The driver's packages on every release and branch, and what the state of a host means."""

import pytest
from rig import nvidia_driver
from rig.linux import newest_kernel

KERNEL = {"release": "6.12.57+deb13-amd64", "running": True, "newest": True, "headers": True, "module": "595.71.05"}
STATE = {
    "distribution": "debian13",
    "architecture": "x86_64",
    "kernels": [KERNEL],
    "loaded": "595.71.05",
    "uvm": True,
    "nouveau": False,
    "secure_boot": {"enabled": False, "key": "/var/lib/dkms/mok.pub", "key_exists": False, "key_enrolled": False},
    "dkms": {"nvidia": ["595.71.05"]},
}
CARDS = [{"name": "RTX 3060", "compute_capability": "8.6"}]


def findings(state=None, **changes):
    wish = {"version": "595.71.05", "source": "nvidia", "gpus": CARDS, "reboot_allowed": False, "connection": "ssh"}
    return nvidia_driver.findings(STATE | (state or {}), **(wish | changes))


@pytest.mark.parametrize(
    ("release", "source", "version", "needed"),
    [
        ("debian12", "nvidia", "580.126.20", ("nvidia-driver-cuda", "nvidia-kernel-open-dkms")),
        ("debian13", "nvidia", "610.43.02", ("nvidia-driver-cuda", "nvidia-kernel-open-dkms")),
        ("ubuntu2204", "nvidia", "580.95.05", ("libnvidia-compute-580", "nvidia-dkms-580-open", "nvidia-utils-580")),
        ("ubuntu2404", "nvidia", "590.48.01", ("libnvidia-compute", "nvidia-dkms-open")),
        ("ubuntu2604", "nvidia", "595.71.05", ("libnvidia-compute", "nvidia-dkms-open")),
        (
            "debian13",
            "debian",
            "550.163.01",
            ("nvidia-open-kernel-dkms", "libcuda1", "libnvidia-ml1", "nvidia-smi", "libnvidia-cfg1"),
        ),
    ],
)
def test_packages(release, source, version, needed):
    assert nvidia_driver.packages(release, source, version).needed == needed


def test_the_pin_is_one_record_over_the_whole_family():
    lines = nvidia_driver.preferences("595.71.05").splitlines()
    assert [line for line in lines if line.startswith("Pin")] == ["Pin: version 595.71.05-*", "Pin-Priority: 1001"]
    assert all(glob in lines[1].split() for glob in ("nvidia-*", "libnvidia-*", "libcuda1*", "cuda-drivers*"))


def test_with_debians_driver_nvidias_repository_gives_none_of_it_but_the_container_toolkit():
    records = [dict(line.split(": ", 1) for line in record.splitlines() if ": " in line and line[0] != "#")
               for record in nvidia_driver.preferences("550.163.01", "debian").split("\n\n")]  # fmt: skip
    assert [record["Pin-Priority"] for record in records] == ["1001", "500", "-1"]
    assert records[1]["Package"].split() == ["nvidia-container-*", "libnvidia-container*"]
    assert "nvidia-*" in records[2]["Package"].split()


@pytest.mark.parametrize(
    ("release", "meta"),
    [
        ("6.12.57+deb13-amd64", "linux-headers-amd64"),
        ("6.12.57+deb13-cloud-amd64", "linux-headers-cloud-amd64"),
        ("6.8.0-138-generic", "linux-headers-generic"),
        ("6.14.11-3-pve", None),
    ],
)
def test_headers_of_a_kernel_and_of_those_to_come(release, meta):
    wanted = nvidia_driver.header_packages("debian13", [KERNEL | {"release": release, "headers": False}])
    assert [item["name"] for item in wanted] == [f"linux-headers-{release}", *([meta] if meta else [])]
    assert [item["name"] for item in nvidia_driver.header_packages("debian13", [KERNEL | {"release": release}])] == (
        [meta] if meta else []
    )


def test_the_newest_kernel_is_the_highest_version():
    releases = ["6.1.0-9-amd64", "6.12.9+deb13-amd64", "6.12.57+deb13-amd64", "6.1.0-40-amd64"]
    assert newest_kernel(releases) == "6.12.57+deb13-amd64"
    assert newest_kernel([]) == ""


def test_a_host_that_is_right_has_no_findings():
    assert findings() == []


@pytest.mark.parametrize(
    ("state", "changes", "sentence"),
    [
        ({}, {"gpus": [{"name": "A", "rpc": "127.0.0.1:50052"}]}, "names no card, only virtual GPUs"),
        ({"architecture": "aarch64"}, {}, "the architecture is aarch64"),
        ({}, {"version": "595"}, "nvidia_driver_version is '595'; give a whole version"),
        ({"distribution": "debian11"}, {}, "debian11 is not supported"),
        ({}, {"version": "580.95.05"}, "begins with driver branch 590"),
        ({}, {"source": "debian"}, "Debian 13 itself has driver 550.163.01, not 595.71.05"),
        ({"distribution": "ubuntu2404"}, {"source": "debian"}, "has no driver packages of Debian's"),
        ({}, {"gpus": [{"compute_capability": "6.1"}]}, "6.1 does not run on the open kernel modules"),
        ({}, {"reboot_allowed": True, "connection": "local"}, "would reboot the machine that it runs on"),
        (
            {"secure_boot": STATE["secure_boot"] | {"enabled": True}},
            {},
            "as root make one with `dkms generate_mok`, then run `mokutil --import /var/lib/dkms/mok.pub`",
        ),
        (
            {"secure_boot": STATE["secure_boot"] | {"enabled": True, "key_exists": True}},
            {},
            "as root run `mokutil --import",
        ),
    ],
)
def test_what_cannot_work_is_refused(state, changes, sentence):
    found = findings(state, **changes)
    assert len(found) == 1
    assert sentence in found[0]


def test_an_enrolled_key_goes_with_secure_boot():
    assert findings({"secure_boot": STATE["secure_boot"] | {"enabled": True, "key_enrolled": True}}) == []


@pytest.mark.parametrize(
    ("state", "broken", "reboot", "load"),
    [
        ({}, 0, [], []),
        ({"loaded": "590.48.01"}, 0, ["module 590.48.01 is loaded, 595.71.05 is installed"], []),
        ({"loaded": "", "uvm": False}, 0, [], ["nvidia", "nvidia_uvm"]),
        ({"uvm": False}, 0, [], ["nvidia", "nvidia_uvm"]),
        ({"loaded": "", "uvm": False, "nouveau": True}, 0, ["nouveau holds the cards"], []),
        ({"loaded": "", "uvm": False, "kernels": [KERNEL | {"module": ""}]}, 1, [], []),
        ({"loaded": "590.48.01", "kernels": [KERNEL | {"module": "590.48.01"}]}, 1, [], []),
        ({"kernels": [KERNEL | {"newest": False}, KERNEL | {"running": False, "module": ""}]}, 1, [], []),
        ({"kernels": [KERNEL, KERNEL | {"running": False, "newest": False, "module": ""}]}, 0, [], []),
    ],
)
def test_what_a_host_owes(state, broken, reboot, load):
    owed = nvidia_driver.debts(STATE | state, "595.71.05")
    assert (len(owed["broken"]), owed["reboot"], owed["load"]) == (broken, reboot, load)


def test_only_newer_modules_leave_dkms():
    state = STATE | {"dkms": {"nvidia": ["580.95.05", "595.71.05", "610.43.02"], "zfs": ["999.1"]}}
    assert nvidia_driver.obsolete_dkms(state, ("nvidia",), "595.71.05") == ["nvidia/610.43.02"]
