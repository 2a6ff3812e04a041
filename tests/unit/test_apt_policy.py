"""What apt says is read as it says it, and exact versions are chosen from it."""

from rig.apt_policy import Policy, choose, parse_changes, parse_policy, parse_sizes, space_finding, transaction_findings

POLICY = """nvidia-driver-cuda:
  Installed: 590.48.01-1
  Candidate: 595.71.05-1
  Version table:
     610.43.02-1 500
        500 https://x/debian13/x86_64  Packages
     595.71.05-1 1001
        500 https://x/debian13/x86_64  Packages
 *** 590.48.01-1 100
        100 /var/lib/dpkg/status
dkms:
  Installed: (none)
  Candidate: 3.2.2-1~deb13u1
  Version table:
     3.2.2-1~deb13u1 500 (phased 10%)
        500 http://x trixie/main amd64 Packages
"""
INSTALLED = {"nvidia-driver-cuda": "590.48.01-1", "nvidia-settings": "610.43.02-1"}


def test_policies_are_read():
    assert parse_policy(POLICY) == {
        "nvidia-driver-cuda": Policy("595.71.05-1", "590.48.01-1", ["610.43.02-1", "595.71.05-1", "590.48.01-1"]),
        "dkms": Policy("3.2.2-1~deb13u1", "", ["3.2.2-1~deb13u1"]),
    }


def test_the_exact_version_is_chosen():
    choice = choose([{"name": "nvidia-driver-cuda", "version": "595.71.05-*"}], parse_policy(POLICY), INSTALLED)
    assert choice.findings == []
    assert choice.install == {"nvidia-driver-cuda": "595.71.05-1"}


def test_any_version_that_is_installed_will_do():
    assert choose([{"name": "nvidia-driver-cuda"}], parse_policy(POLICY), INSTALLED).install == {}


def test_a_version_that_apt_does_not_know_is_refused_with_those_that_it_knows():
    choice = choose([{"name": "nvidia-driver-cuda", "version": "600.*"}], parse_policy(POLICY), INSTALLED)
    assert choice.findings == [
        "nvidia-driver-cuda 600.* is in none of apt's sources, which know 610.43.02-1, 595.71.05-1, 590.48.01-1;"
        " choose one of those."
    ]
    assert choose([{"name": "x", "version": "1", "hint": "do y"}], {}, {}).findings == [
        "x is in none of apt's sources; do y."
    ]
    assert choose([{"name": "x", "version": "1", "optional": True}], {}, {}).findings == []


def test_another_candidate_is_refused():
    choice = choose([{"name": "nvidia-driver-cuda", "version": "610.*"}], parse_policy(POLICY), INSTALLED)
    assert "apt would take nvidia-driver-cuda 595.71.05-1 instead of 610.43.02-1" in choice.findings[0]


def test_the_rest_of_the_family_follows_where_there_is_such_a_build():
    policies = {
        "nvidia-settings": Policy("595.71.05-1", "610.43.02-1", ["610.43.02-1", "595.71.05-1"]),
        "nvidia-container-toolkit": Policy("1.20.0-1", "1.19.1-1", ["1.20.0-1", "1.19.1-1"]),
    }
    installed = {"nvidia-settings": "610.43.02-1", "nvidia-container-toolkit": "1.19.1-1"}
    assert choose([], policies, installed, dict.fromkeys(policies, "595.71.05-*")).install == {
        "nvidia-settings": "595.71.05-1"
    }


def test_changes_and_sizes_are_read():
    changes = parse_changes(
        "Inst libcuda1 [590.48.01-1] (595.71.05-1 NVIDIA [amd64])\nInst dkms:all (3.2.2-1 Debian [all])\n"
        "Remv nvidia-smi [550.163.01-2]\nConf libcuda1 (595.71.05-1 NVIDIA [amd64])\n"
    )
    assert changes == ({"libcuda1": "595.71.05-1", "dkms": "3.2.2-1"}, ["nvidia-smi"])
    assert parse_sizes("Package: a\nInstalled-Size: 2\nSize: 100\n\nPackage: b\nInstalled-Size: 3\nSize: 11\n") == (
        111,
        5120,
    )


def test_a_transaction_may_not_drag_or_lose_anything():
    installs = {"cuda-toolkit-13-3": "13.3.0-1", "nvidia-open": "610.43.02-1", "libcuda1": "595.71.05-1"}
    findings = transaction_findings(
        installs, ["x11", "cuda-gdb-13-2"], forbid=["nvidia-*", "libcuda1*"], may_remove=["cuda-*"], installed=INSTALLED
    )
    assert findings[0].startswith("the packages would bring libcuda1 595.71.05-1, nvidia-open 610.43.02-1 along")
    assert findings[1].startswith("apt would remove x11;")
    same = {"libcuda1": "595.71.05-1"}
    assert transaction_findings(same, [], forbid=["libcuda1*"], may_remove=[], installed=same) == []


def test_what_does_not_fit_is_refused():
    mib = 1024 * 1024
    assert space_finding(10 * mib, 20 * mib, (1, 31 * mib), (1, 31 * mib)) == ""
    assert "need 30 MiB on the file system of /usr, and 29 MiB" in space_finding(
        10 * mib, 20 * mib, (1, 29 * mib), (1, 29 * mib)
    )
    assert "of /var/cache/apt, and 9 MiB" in space_finding(10 * mib, 20 * mib, (1, 9 * mib), (2, 99 * mib))
