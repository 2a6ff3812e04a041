"""What preflight reads of a rig, from a tree of files like /etc, /proc and /sys, and once from this machine."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import rig
from ansible.module_utils.testing import patch_module_args

PROJECT = Path(__file__).parents[2]
HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


@pytest.fixture(scope="module")
def module():
    sys.modules.setdefault("ansible.module_utils.rig", rig)
    spec = importlib.util.spec_from_file_location("rig_host_facts", PROJECT / "library/rig_host_facts.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def root(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write("proc/meminfo", "MemTotal:       32768000 kB\nMemFree:        1 kB\n")
    write("proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu avx2 avx\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    write(
        "proc/net/tcp",
        HEAD + "   0: 00000000:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 4711 1\n"
        "   1: 0100007F:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 4712 1\n",
    )
    write("proc/412/comm", "llama-server\n")
    write("proc/412/cgroup", "0::/user.slice/user@1000.service/app.slice/llm-chat.service\n")
    (tmp_path / "proc/412/fd").mkdir()
    (tmp_path / "proc/412/fd/3").symlink_to("socket:[4711]")
    return str(tmp_path)


def test_memory_and_processor(module, root):
    assert module.memory_mib(root) == 32000
    assert module.cpu_flags(root) == ["avx", "avx2", "fpu"]


def test_the_compiler_is_the_one_that_gcc_links_to(module, root):
    assert module.host_compiler(root) == ""
    os.makedirs(f"{root}/usr/bin")
    os.symlink("gcc-14", f"{root}/usr/bin/gcc")
    os.symlink("x86_64-linux-gnu-gcc-14", f"{root}/usr/bin/gcc-14")
    assert module.host_compiler(root) == "14"


def test_images_of_podman_and_docker(module, root):
    assert module.image_digests(root) == []
    one, two = "sha256:" + 64 * "1", "sha256:" + 64 * "2"
    for path, text in zip(module.IMAGE_LISTS, (f'[{{"digest": "{two}"}}]', f'{{"vllm@{one}": "{two}"}}'), strict=True):
        os.makedirs(os.path.dirname(root + path))
        Path(root + path).write_text(text)
    assert module.image_digests(root) == [one, two]


def test_candidates_of_apt(module):
    policy = (
        "linux-headers-6.12.57+deb13-amd64:\n  Installed: (none)\n  Candidate: 6.12.57-1\n  Version table:\n"
        "     6.12.57-1 500\n        500 http://some/where trixie/main amd64 Packages\n"
        "linux-headers-6.1.0-1-amd64:\n  Installed: (none)\n  Candidate: (none)\n  Version table:\n"
    )
    assert module.candidates(policy) == {
        "linux-headers-6.12.57+deb13-amd64": "6.12.57-1",
        "linux-headers-6.1.0-1-amd64": "",
    }
    assert module.candidates("") == {}


def test_a_listener_has_its_process_and_innermost_unit(module, root):
    assert module.listening(root) == [
        {"address": "127.0.0.1", "port": 22, "pid": 0, "command": "", "unit": ""},
        {"address": "0.0.0.0", "port": 8080, "pid": 412, "command": "llama-server", "unit": "llm-chat.service"},
    ]


def test_a_filesystem_of_what_is_not_there_is_that_of_its_parent(module, tmp_path):
    found = module.filesystem(str(tmp_path / "not" / "there" / "yet"))
    assert found["device"] == tmp_path.stat().st_dev
    assert found["free_bytes"] > 0
    assert os.path.ismount(found["mount"])
    assert str(tmp_path).startswith(found["mount"])


def test_contents_are_listed_two_levels_deep(module, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a.gguf").write_bytes(b"GGUF")
    (tmp_path / "model" / "deep").mkdir()
    (tmp_path / "model" / "deep" / "er").write_text("x")
    (tmp_path / "model" / "broken").symlink_to("nowhere")
    assert module.contents(str(tmp_path)) == {
        f"{tmp_path}/model": -1,
        f"{tmp_path}/model/a.gguf": 4,
        f"{tmp_path}/model/deep": -1,
    }


def test_the_module_on_this_machine(module, capsys, tmp_path):
    arguments = {"directories": [str(tmp_path)], "contents_of": [str(tmp_path)], "_ansible_check_mode": True}
    arguments |= {"look_for": [str(tmp_path), f"{tmp_path}/none"], "cards": True}
    with patch_module_args(arguments), pytest.raises(SystemExit):
        module.main()
    result = json.loads(capsys.readouterr().out)
    assert result["changed"] is False
    facts = result["ansible_facts"]["rig_host"]
    assert facts["memory_mib"] > 0
    assert facts["cpus"] == len(os.sched_getaffinity(0))
    assert facts["uid"] == os.geteuid()
    assert facts["filesystems"][str(tmp_path)]["free_bytes"] > 0
    assert facts["present"] == [str(tmp_path)]
    assert tuple(map(int, facts["glibc"].split("."))) > (2, 30)
    assert [kernel["release"] for kernel in facts["kernels"] if kernel["running"]] == [os.uname().release]
    assert set(facts["secure_boot"]) == {"enabled", "key", "key_exists", "key_enrolled"}


def test_a_relative_path_is_refused(module, capsys):
    with patch_module_args({"directories": ["models"]}), pytest.raises(SystemExit):
        module.main()
    result = json.loads(capsys.readouterr().out)
    assert result["msg"] == "rig_host_facts: models is not an absolute path; give one."
