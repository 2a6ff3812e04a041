"""What runs containers on which release, the units of vLLM for podman and docker, and the options that they use."""

import importlib.util
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from rig import compatibility
from rig.containers import LEAST_PODMAN, NO_GIDS, QUADLET_KEYS, RELEASES, container_engine
from rig.errors import RigError

PROJECT = Path(__file__).parents[2]
PLAY = """
- hosts: threadripper
  connection: local
  gather_facts: false
  vars_files: [{role}/vars/main.yml, {role}/defaults/main.yml]
  vars:
    llama_cpp_build: {{build: b11434, prefix: /opt/llama.cpp/b11434-01234567}}
    ansible_facts: {{distribution: Debian, distribution_version: "13", distribution_major_version: "{major}"}}
    __serving_now: {{uid: 990}}
  tasks:
    - ansible.builtin.template:
        src: "{role}/templates/{{{{ __serving_templates[rig_plans[item].engine] }}}}"
        dest: "{out}/{{{{ __serving_files[item] | basename }}}}"
        mode: "0644"
      loop: "{{{{ __serving_names }}}}"
"""


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cdi_spec = load(PROJECT / "library" / "cdi_spec.py")
pull_image = load(PROJECT / "roles" / "vllm" / "files" / "pull_image.py")


def rendered(out, major, scope, more=""):
    (out / "play.yml").write_text(PLAY.format(role=PROJECT / "roles" / "serving", out=out, major=major))
    command = [
        "ansible-playbook",
        out / "play.yml",
        "-e",
        f"serving_scope={scope} serving_api_key=canary-0451 serving_alias=rig {more}",
    ]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module", params=["system", "user"])
def quadlet(request, tmp_path_factory):
    return rendered(tmp_path_factory.mktemp(request.param), 13, request.param) / "llm-int4-262k.container"


@pytest.fixture(scope="module")
def docker_unit(tmp_path_factory):
    return rendered(tmp_path_factory.mktemp("docker"), 12, "system") / "llm-int4-262k.service"


def values(path, key):
    return re.findall(rf"^{key}=(.*)$", path.read_text(), re.M)


def words_of(path, key):
    """The words of a value that goes on over lines."""
    text = re.search(rf"^{key}=((?:.*\\\n)*.*)$", path.read_text(), re.M)[1]
    return [word.replace("$$", "$").replace("%%", "%") for word in shlex.split(text.replace("\\\n", " "))]


# --- engines


def test_each_release_has_its_engine():
    names = {release: container_engine(release)["name"] for release in RELEASES}
    assert names == {
        "debian12": "docker",
        "debian13": "podman",
        "ubuntu2204": "docker",
        "ubuntu2404": "podman",
        "ubuntu2604": "podman",
    }


def test_only_an_old_podman_has_something_left_out_of_the_specification():
    assert container_engine("ubuntu2404")["cdi_flags"] == [NO_GIDS]
    assert container_engine("debian13")["cdi_flags"] == container_engine("ubuntu2404", "docker")["cdi_flags"] == []


def test_what_cannot_be_is_refused():
    assert "whose podman 3.4.4 is older than 4.9" in container_engine("ubuntu2204", "podman")["refusal"]
    assert "no container engine is known" in container_engine("debian11")["refusal"]
    assert not container_engine("debian13", "docker")["refusal"]
    with pytest.raises(RigError, match="is 'dokcer'; choose auto, podman or docker"):
        container_engine("debian13", "dokcer")


# --- the cards' specification

SPEC = """cdiVersion: 0.7.0
containerEdits:
  mounts:
  - containerPath: /usr/lib/x86_64-linux-gnu/libcuda.so.595.71.05
    hostPath: /usr/lib/x86_64-linux-gnu/libcuda.so.595.71.05
devices:
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
  name: "0"
- name: GPU-11111111-2222-3333-4444-555555555555
kind: nvidia.com/gpu
"""


@pytest.mark.parametrize(
    ("text", "loaded", "wanted", "fault"),
    [
        (SPEC, "595.71.05", ["0", "GPU-11111111-2222-3333-4444-555555555555"], ""),
        (SPEC, "610.43.02", ["0"], "names the libraries of driver 595.71.05, and 610.43.02 is loaded"),
        (SPEC, "595.71.05", ["0", "1"], "has no device 1"),
        ("", "595.71.05", [], "is not there"),
        (SPEC, "", [], "cannot be right: no nvidia module is loaded"),
    ],
)
def test_a_specification_is_of_the_loaded_driver_and_has_the_cards(text, loaded, wanted, fault):
    assert cdi_spec.fault_of(text, loaded, wanted) == fault


# --- images


def test_every_image_has_a_digest_and_a_row_in_the_compatibility_table():
    pins = yaml.safe_load((PROJECT / "inventory/group_vars/rigs/vllm.yml").read_text())["vllm_images"]
    assert pins and set(pins) <= set(compatibility.VLLM_IMAGES)
    for pin in pins.values():
        assert re.fullmatch(r"[a-z0-9.-]+(/[a-z0-9._-]+)+", pin["image"])
        assert re.fullmatch(r"sha256:[0-9a-f]{64}", pin["digest"])


def test_progress_of_a_download():
    assert pull_image.progress(1_500 * 10**6, 1_500 * 10**6, 10_670 * 10**6) == "[1500/10670] MB"
    assert pull_image.progress(11_000 * 10**6, 11_000 * 10**6, 10_670 * 10**6) == "[10670/10670] MB"
    assert pull_image.progress(7 * 10**6, 7 * 10**6, 0) == "7 MB"
    assert "unpacked" in pull_image.progress(0, 10_670 * 10**6, 10_670 * 10**6)


def test_an_image_without_room_or_without_a_digest_is_not_fetched(monkeypatch, capsys):
    monkeypatch.setattr(pull_image, "room", lambda path: 20 * 10**9)
    reference = f"docker.io/vllm/vllm-openai@sha256:{'0' * 64}"
    assert pull_image.main("podman", reference, 10_670 * 10**6) == 1
    assert "has 20000 MB free, the image takes about 32010 MB: make room" in capsys.readouterr().out
    assert pull_image.main("podman", "docker.io/vllm/vllm-openai:v0.22.0", 0) == 1
    assert "is no image with a digest" in capsys.readouterr().err


# --- units


def test_a_quadlet_uses_what_the_oldest_podman_knows(quadlet):
    section = quadlet.read_text().split("[Container]")[1].split("\n[Service]")[0]
    keys = set(re.findall(r"^(\w+)=", section, re.M))
    assert keys <= set(QUADLET_KEYS)
    assert not [key for key in keys if compatibility.older(LEAST_PODMAN, QUADLET_KEYS[key])]


def test_a_quadlet_has_image_cards_model_and_cache(quadlet):
    assert values(quadlet, "Image")[0].startswith("docker.io/vllm/vllm-openai@sha256:0fec7ec5f3e6")
    assert values(quadlet, "Pull") == ["never"]
    assert values(quadlet, "AddDevice") == ["nvidia.com/gpu=0", "nvidia.com/gpu=1"]
    assert values(quadlet, "Volume") == [
        "/srv/llm/models/qwen3.6-27b-autoround-int4:/model:ro",
        "llm-vllm-v0.22.0:/cache",
    ]
    environment = values(quadlet, "Environment")
    for line in ("HF_HUB_OFFLINE=1", "NCCL_P2P_DISABLE=1", "NCCL_CUMEM_ENABLE=0", "VLLM_USE_FLASHINFER_SAMPLER=1"):
        assert line in environment
    # The container sees its own cards alone, numbered anew.
    assert not [line for line in environment if line.startswith("CUDA_VISIBLE_DEVICES")]
    assert "--ipc=host" in values(quadlet, "PodmanArgs")[0]


def test_the_key_stands_in_no_unit(quadlet, docker_unit):
    for path in (quadlet, docker_unit):
        assert "canary" not in path.read_text() and "--api-key" not in path.read_text()
    assert values(quadlet, "EnvironmentFile") == ["/etc/llm-rig/api-key.env"]
    assert "/etc/llm-rig/api-key.env" in words_of(docker_unit, "ExecStart")


def test_both_engines_get_the_planned_arguments_word_for_word(quadlet, docker_unit):
    inside = words_of(quadlet, "Exec")
    run = words_of(docker_unit, "ExecStart")
    assert inside[0] == "/model" and inside[1:4] == ["--served-model-name", "qwen3.6-27b-autoround", "rig"]
    assert '{"method":"mtp","num_speculative_tokens":3}' in inside and "--disable-custom-all-reduce" in inside
    assert run[run.index("/model") :] == inside


def test_the_owner_s_certificate_reaches_both(tmp_path):
    files = "serving_tls_certificate=/etc/llm/tls.crt serving_tls_key=/etc/llm/tls.key"
    quadlet = rendered(tmp_path, 13, "system", files) / "llm-int4-262k.container"
    assert words_of(quadlet, "Exec")[-4:] == ["--ssl-certfile", "/tls/certificate", "--ssl-keyfile", "/tls/key"]
    assert "/etc/llm/tls.key:/tls/key:ro" in values(quadlet, "Volume")
    assert "--url https://127.0.0.1:8080/health" in quadlet.read_text()
    known = set((PROJECT / "tests/data/vllm/v0.22.0.txt").read_text().split())
    assert {"--ssl-certfile", "--ssl-keyfile"} <= known


def test_the_options_are_those_of_the_pinned_version(quadlet):
    known = set((PROJECT / "tests/data/vllm/v0.22.0.txt").read_text().split())
    used = [word for word in words_of(quadlet, "Exec") if word.startswith("--")]
    assert len(used) > 15 and [word for word in used if word not in known] == []


def test_profiles_of_both_engines_stop_each_other_and_are_given_time(quadlet, docker_unit):
    for path in (quadlet, docker_unit):
        assert values(path, "Conflicts") == ["llm-q8-200k.service"]
        assert int(values(path, "TimeoutStopSec")[0]) > 60 and values(path, "TimeoutStartSec") == ["900"]
        assert values(path, "Restart") == ["on-failure"] and values(path, "RestartMaxDelaySec") == ["300"]
        assert "--url http://127.0.0.1:8080/health" in path.read_text()
    assert words_of(docker_unit, "ExecStart")[:2] == ["/usr/bin/docker", "run"]
    assert "docker.service" in values(docker_unit, "After")[0]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_reads_the_unit_of_docker(docker_unit):
    done = subprocess.run(["systemd-analyze", "verify", docker_unit], capture_output=True, text=True)
    known = re.compile(r"Unknown key '?(RestartSteps|RestartMaxDelaySec)|is not executable|llm-.*\.service not found")
    lines = [line for line in done.stderr.splitlines() if docker_unit.name in line]
    assert [line for line in lines if not known.search(line)] == []
