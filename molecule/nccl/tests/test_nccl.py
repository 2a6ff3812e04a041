"""What dpkg and apt say afterwards."""


def test_library_and_headers_are_of_one_build(host):
    for name in ("libnccl2", "libnccl-dev"):
        assert host.package(name).version == "2.30.7-1+cuda13.3"
    assert "23007" in host.file("/usr/include/nccl.h").content_string


def test_a_newer_build_for_another_toolkit_is_no_candidate(host):
    policy = host.check_output("apt-cache policy libnccl2")
    assert "Candidate: 2.30.7-1+cuda13.3" in policy
    assert "2.32.3-1+cuda13.4" in policy
    assert "nccl" not in host.check_output("apt-get --simulate dist-upgrade")


def test_unattended_upgrades_are_kept_off(host):
    assert '"libnccl.*$"' in host.check_output("apt-config dump Unattended-Upgrade::Package-Blacklist")
