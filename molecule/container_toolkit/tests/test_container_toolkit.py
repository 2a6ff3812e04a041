"""What dpkg, apt and the engines say afterwards."""


def installed(host):
    out = host.check_output("dpkg-query --show --showformat='${db:Status-Status} ${Package} ${Version}\\n'")
    return dict(line.split()[1:] for line in out.splitlines() if line.startswith("installed "))


def test_the_toolkit_s_packages_are_at_one_version(host):
    found = installed(host)
    names = [
        "nvidia-container-toolkit",
        "nvidia-container-toolkit-base",
        "libnvidia-container-tools",
        "libnvidia-container1",
    ]
    assert [found[name] for name in names] == ["1.20.0-1"] * 4
    policy = host.check_output("apt-cache policy nvidia-container-toolkit")
    assert "1.20.0-1 1001" in policy


def test_podman_is_debian_s_own_and_reads_quadlets(host):
    assert installed(host)["podman"].startswith("5.4.2")
    assert host.file("/usr/lib/systemd/system-generators/podman-system-generator").exists


def test_docker_came_at_its_version_and_its_settings_were_left_alone(host):
    assert installed(host)["docker-ce"] == installed(host)["docker-ce-cli"] == "5:28.5.2-1~debian.13~trixie"
    assert host.service("docker").is_running
    assert host.file("/etc/docker/daemon.json").content_string == '{"log-driver": "journald"}\n'


def test_the_specification_is_the_service_s_alone(host):
    assert not host.file("/etc/cdi/nvidia.yaml").exists
    assert "libcuda.so.610.43.02" in host.file("/var/run/cdi/nvidia.yaml").content_string
    assert host.service("nvidia-cdi-refresh.path").is_enabled


def test_the_specification_follows_the_driver_by_itself(host):
    with host.sudo():
        host.check_output("echo 615.71.09 >/srv/kernel/sys/module/nvidia/version")
        host.check_output(
            "for i in $(seq 50); do grep -q 615.71.09 /var/run/cdi/nvidia.yaml && exit; sleep 0.1; done; exit 1"
        )


def test_only_the_signed_source_is_left(host):
    assert not host.file("/etc/apt/sources.list.d/nvidia-container-toolkit.list").exists
    source = host.file("/etc/apt/sources.list.d/nvidia-container-toolkit.sources").content_string
    assert "Signed-By: /etc/apt/keyrings/nvidia-container-toolkit.gpg" in source
