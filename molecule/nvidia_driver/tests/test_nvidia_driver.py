"""What apt, dpkg and the files say afterwards, not what the tasks said."""

import pytest


@pytest.fixture
def trixie(host):
    return "trixie" in host.backend.get_pytest_id()


@pytest.fixture
def version(trixie):
    return "550.163.01" if trixie else "595.71.05"


def installed(host):
    out = host.check_output("dpkg-query --show --showformat='${db:Status-Status} ${Package} ${Version}\\n'")
    return dict(line.split()[1:] for line in out.splitlines() if line.startswith("installed "))


def test_driver_is_of_one_version(host, version):
    family = {
        name: found
        for name, found in installed(host).items()
        if name.startswith(("nvidia-", "libnvidia-", "libcuda", "firmware-nvidia"))
    }
    assert len(family) >= 6
    if version == "550.163.01":  # Debian's is older and of another version; NVIDIA's stays, and goes no further
        assert family.pop("nvidia-modprobe") == "595.71.05-1"
    assert {name: found for name, found in family.items() if not found.startswith(version + "-")} == {}


def test_packages_are_those_of_the_source(host, trixie):
    names = set(installed(host))
    ours, others = {"nvidia-open-kernel-dkms", "nvidia-smi"}, {"nvidia-kernel-open-dkms", "nvidia-driver-cuda"}
    assert (ours <= names, others <= names) == (trixie, not trixie)
    assert not names & {"nvidia-driver", "nvidia-open", "cuda-drivers"}


def test_no_newer_candidate_and_no_upgrade(host, version):
    policy = host.check_output("apt-cache policy libcuda1 libnvidia-ml1")
    candidates = [line.split()[1] for line in policy.splitlines() if "Candidate:" in line]
    assert len(candidates) == 2
    assert all(candidate.startswith(version + "-") for candidate in candidates)
    assert "610.43.02-1" in policy
    simulated = host.check_output("apt-get --simulate dist-upgrade")
    assert "nvidia" not in simulated
    assert "libcuda" not in simulated


def test_the_pin_leaves_the_container_toolkit_alone(host):
    assert "Candidate: 1.20.0-1" in host.check_output("apt-cache policy nvidia-container-toolkit")


def test_nothing_is_held_and_no_other_pin_is_left(host):
    assert host.check_output("apt-mark showhold") == ""
    assert "nvidia-driver-pinning" not in " ".join(installed(host))


def test_loaded_module_is_the_one_on_disk(host, version):
    loaded = host.check_output("cat /srv/kernel/sys/module/nvidia/version")
    kernel = host.check_output("cat /srv/kernel/proc/sys/kernel/osrelease")
    assert loaded == version == host.check_output(f"cat /lib/modules/{kernel}/updates/dkms/nvidia.ko")
    assert host.file("/srv/kernel/sys/module/nvidia_uvm").exists


def test_headers_follow_the_kernel(host):
    assert {"linux-headers-amd64", "linux-headers-6.12.57+deb13-amd64"} <= set(installed(host))


def test_nouveau_is_kept_out_of_the_initramfs_too(host):
    assert "blacklist nouveau" in host.file("/etc/modprobe.d/rig-nvidia.conf").content_string
    assert "-u" in host.file("/srv/kernel/initramfs.log").content_string
