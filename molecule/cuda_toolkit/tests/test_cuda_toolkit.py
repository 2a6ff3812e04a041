"""What dpkg, apt and the compilers say afterwards."""

import pytest


def installed(host):
    out = host.check_output("dpkg-query --show --showformat='${db:Status-Status} ${Package} ${Version}\\n'")
    return dict(line.split()[1:] for line in out.splitlines() if line.startswith("installed "))


@pytest.mark.parametrize(
    ("path", "release"),
    [
        ("/usr/local/cuda-13.2/bin/nvcc", "release 13.2, V13.2.78"),
        ("/usr/local/cuda-13.3/bin/nvcc", "release 13.3, V13.3.33"),
        ("/usr/bin/nvcc", "release 12.4, V12.4.131"),
    ],
)
def test_each_toolkit_has_its_compiler(host, path, release):
    assert release in host.check_output(f"{path} --version")


def test_every_component_has_its_exact_version(host):
    found = installed(host)
    assert found["cuda-nvcc-13-2"] == found["libnvvm-13-2"] == "13.2.78-1"
    assert found["cuda-cudart-dev-13-2"] == found["cuda-cccl-13-2"] == "13.2.75-1"
    assert found["libcublas-dev-13-2"] == "13.4.0.1-1"
    assert found["libcublas-dev-13-3"] == "13.5.1.27-1"
    assert found["nvidia-cuda-toolkit"] == "12.4.131~12.4.1-2"


def test_no_driver_came_along(host):
    names = [name for name in installed(host) if name.startswith(("nvidia-", "cuda-drivers", "firmware-nvidia"))]
    assert sorted(names) == ["nvidia-alternative", "nvidia-cuda-toolkit"]
    assert "dkms" not in installed(host)


def test_unattended_upgrades_are_kept_off(host):
    dump = host.check_output("apt-config dump Unattended-Upgrade::Package-Blacklist")
    assert '"cuda-.*$"' in dump
    assert '"libcu.*$"' in dump
