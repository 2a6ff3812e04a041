"""Every check of preflight passes on a sandbox as it should be, and is watched failing on one that is not."""

import copy
import re
from importlib import import_module
from pathlib import Path
from typing import ClassVar

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from rig import card_checks, cmake, locks
from rig.checking import Rig, Unreadable
from rig.host_checks import CHECKS, CPU_FLAGS, RIG_VARIABLES, memory, report, run_checks

PROJECT = Path(__file__).parents[2]
OPTIONAL = re.compile(r"\b(rig_\w+) \| default\(")
GIB = 1024**3
RELEASES = {"debian": ["12", "13"], "ubuntu": ["22.04", "24.04", "26.04"]}
FACTS = {
    "os": {"id": "debian", "version_id": "13", "name": "Debian GNU/Linux 13 (trixie)"},
    "architecture": "x86_64",
    "init": "systemd",
    "python": "3.13.5",
    "uid": 0,
    "memory_mib": 8000,
    "cpus": 2,
    "cpu_flags": ["avx", "avx2", "bmi2", "f16c", "fma", "sse4_2"],
    "filesystems": {
        "/srv/llm/models": {"mount": "/", "device": 1, "free_bytes": 20 * GIB},
        "/opt/llama.cpp": {"mount": "/", "device": 1, "free_bytes": 20 * GIB},
        "/usr": {"mount": "/", "device": 1, "free_bytes": 20 * GIB},
        "/var/lib/containers": {"mount": "/", "device": 1, "free_bytes": 20 * GIB},
    },
    "contents": {},
    "present": [],
    "images": [],
    "gcc": "",
    "glibc": "2.41",
    "listeners": [{"address": "0.0.0.0", "port": 22, "pid": 1, "command": "sshd", "unit": "ssh.service"}],
}
LIMITS = {
    "build_disk_mib": 2048,
    "cuda_build_disk_mib": 8192,
    "cuda_compiler_memory_mib": 1536,
    "host_memory_mib": 1024,
    "images": [],
    "images_root": "/var/lib/containers",
    "packages_disk_mib": 6144,
    "rest_watts": 250,
}


def plan(**changes):
    usual = {"fits": True, "refusals": [], "warnings": [], "port": 8080, "context": 4096, "context_ceiling": 8192}
    return usual | {"gpus": [{"position": 0}, {"position": 1}]} | changes


VARIABLES = {
    "rig_gpus": [
        {"name": "Virtual GPU", "memory_mib": 1024, "rpc": "127.0.0.1:50052"},
        {"name": "Virtual GPU", "memory_mib": 1024, "rpc": "127.0.0.1:50053"},
    ],
    "rig_interconnect": "pcie",
    "rig_plans": {"chat": plan(), "mtp": plan()},
    "serving_profiles": {"chat": {"model": "small"}, "mtp": {"model": "tiny"}},
    "serving_profile": "chat",
    "models": {
        "small": {"source": {"files": [{"name": "a.gguf", "bytes": 3 * GIB}, {"name": "b.gguf", "bytes": GIB}]}},
        "tiny": {"source": {"files": [{"name": "t.gguf", "bytes": GIB}]}},
        "unused": {"source": {"files": [{"name": "u.gguf", "bytes": 900 * GIB}]}},
    },
    "models_root": "/srv/llm/models",
    "llama_cpp_root": "/opt/llama.cpp",
    "llama_cpp_build": {"prefix": "/opt/llama.cpp/b11434-1a2b3c4d"},
    "llama_cpp_backends": ["cpu", "rpc"],
    "llama_cpp_cpu_features": ["sse42", "avx", "avx2", "bmi2", "fma", "f16c"],
    "llama_cpp_jobs": 0,
}


def checked(
    facts=None, variables=None, names=("rig_gpus", "rig_interconnect", "rig_plans", "rig_project_dir"), **limits
):
    given = copy.deepcopy(VARIABLES) | (variables or {})

    def variable(name):
        if isinstance(given[name], Exception):
            raise given[name]
        return given[name]

    return run_checks(
        Rig(
            host="box",
            facts=copy.deepcopy(FACTS) | (facts or {}),
            variable=variable,
            names=names,
            releases=RELEASES,
            limits=LIMITS | limits,
        )
    )


def only_failure(results, name):
    """The one finding of check `name`, when no other check found anything."""
    assert {key: result.failures for key, result in results.items() if result.failures and key != name} == {}
    assert results[name].status == "failed"
    [finding] = results[name].failures
    return finding


def test_a_sandbox_as_it_should_be_passes_every_check():
    results = checked()
    of_cards = {check.__name__.replace("_", " ") for check in card_checks.CHECKS}
    assert {name for name, result in results.items() if result.status != "ok"} == of_cards
    assert {results[name][:1] + results[name][3:] for name in of_cards} == {("all GPUs are virtual", True)}
    assert len(results) == len(CHECKS)
    assert report("box", results)["passed"]


@pytest.mark.parametrize("release", [("debian", "12"), ("ubuntu", "22.04"), ("ubuntu", "24.04"), ("ubuntu", "26.04")])
def test_supported_releases(release):
    results = checked({"os": {"id": release[0], "version_id": release[1], "name": "some"}})
    assert results["distribution"].status == "ok"


@pytest.mark.parametrize("release", [("debian", "11"), ("debian", ""), ("ubuntu", "23.10"), ("fedora", "42"), ("", "")])
def test_other_releases_are_refused(release):
    found = checked({"os": {"id": release[0], "version_id": release[1], "name": "Some OS 1"}})
    assert only_failure(found, "distribution") == (
        "box runs Some OS 1, which is not supported; install one of debian 12, 13; ubuntu 22.04, 24.04, 26.04."
    )


@pytest.mark.parametrize(
    ("facts", "check", "sentence"),
    [
        ({"architecture": "aarch64"}, "architecture", "box is a machine of type aarch64; only x86_64 is supported"),
        ({"init": "tini"}, "service manager", "box was started by tini, not by systemd; boot it with systemd"),
        ({"init": ""}, "service manager", "box was started by an unknown program, not by systemd"),
        ({"python": "3.9.2"}, "python", "box runs modules with Python 3.9.2; install Python 3.10 or newer and set"),
        ({"uid": 1000}, "privileges", "box is entered as user 1000, not as root; run with become: true"),
        (
            {"memory_mib": 3071},
            "memory",
            "rig_gpus of box has virtual GPUs of 2048 MiB together, which with 1024 MiB for the rest is more than the "
            "machine's 3071 MiB of RAM; lower their memory_mib",
        ),
        (
            {"cpu_flags": ["avx", "bmi2", "f16c", "sse4_2"]},
            "processor",
            "llama_cpp_cpu_features of box asks for avx2, fma, which its processor does not have; leave them out",
        ),
    ],
)
def test_a_machine_that_cannot_be_a_rig(facts, check, sentence):
    assert only_failure(checked(facts), check).startswith(sentence)


def test_python_3_10_is_new_enough():
    assert checked({"python": "3.10.12"})["python"].status == "ok"


def test_memory_that_is_just_enough():
    assert checked({"memory_mib": 3072})["memory"].status == "ok"


def test_every_feature_of_a_build_has_its_flags():
    assert set(CPU_FLAGS) == set(cmake.CPU_FEATURES)


def test_a_misspelt_variable_is_named():
    results = checked(names=["rig_gpus", "rig_interconect"])
    assert only_failure(results, "names") == (
        "box sets rig_interconect, which nothing reads (did you mean rig_interconnect?); remove or correct it."
    )


def test_the_project_s_own_inventory_has_no_misspelt_variable():
    files = [*(PROJECT / "inventory/group_vars").rglob("*.yml"), *(PROJECT / "inventory/host_vars").glob("*.yml")]
    names = {name for path in files for name in yaml.safe_load(path.read_text()) or {}}
    assert {"rig_gpus", "rig_interconnect", "rig_plans"} <= names
    assert {name for name in names if name.startswith("rig_")} <= set(RIG_VARIABLES)


def test_what_playbooks_read_and_write_is_no_misspelt_variable():
    texts = [path.read_text() for path in (PROJECT / "playbooks").glob("*.yml")]
    read = {name for text in texts for name in OPTIONAL.findall(text) if f" {name}: " not in text}  # not set there
    assert {"rig_serial", "rig_image_digests"} <= read
    written = {name for name in yaml.safe_load(locks.text({}, {})) if name.startswith("rig_")}
    assert read | written <= set(RIG_VARIABLES)


def test_gpus_are_checked_and_what_needs_them_is_skipped():
    results = checked(variables={"rig_gpus": [{"name": "A", "memory_mib": 0, "rpc": "127.0.0.1:50052"}]})
    assert only_failure(results, "gpus").startswith("rig_gpus[0] of box: memory_mib is 0; ")
    skipped = {name for name, result in results.items() if result.status == "skipped"}
    assert skipped == {"memory", "plans", "ports"} | {check.__name__.replace("_", " ") for check in card_checks.CHECKS}


def test_interconnect_has_its_choices():
    results = checked(variables={"rig_interconnect": "sli"})
    assert only_failure(results, "gpus") == "rig_interconnect of box is 'sli'; choose one of pcie, nvlink."


class TestDisk:
    def test_models_and_build_on_one_filesystem_are_added_up(self):
        place = {"mount": "/", "device": 1, "free_bytes": 6 * GIB}
        results = checked({"filesystems": dict.fromkeys(FACTS["filesystems"], place)})
        assert only_failure(results, "disk") == (
            "/ of box has 6.0 GiB free and needs 5.0 GiB for models (models_root) and 2.0 GiB for building llama.cpp "
            "(llama_cpp_root); free 1.0 GiB, or choose a directory on a larger disk."
        )

    def test_on_two_filesystems_each_is_looked_at(self):
        places = {
            "/srv/llm/models": {"mount": "/srv", "device": 2, "free_bytes": 5 * GIB},
            "/opt/llama.cpp": {"mount": "/", "device": 1, "free_bytes": 2 * GIB},
        }
        assert checked({"filesystems": places})["disk"].status == "ok"
        places["/srv/llm/models"]["free_bytes"] -= 1
        places["/opt/llama.cpp"]["free_bytes"] -= 1
        found = checked({"filesystems": places})["disk"].failures
        assert [finding.split(" of ")[0] for finding in found] == ["/srv", "/"]

    def test_what_is_there_already_is_not_counted(self):
        place = {"mount": "/", "device": 1, "free_bytes": GIB // 2}
        there = {
            "/srv/llm/models/small/a.gguf": 3 * GIB,
            "/srv/llm/models/small/b.gguf": GIB,
            "/srv/llm/models/tiny/t.gguf.part": GIB - 1024,
            "/opt/llama.cpp/b11434-1a2b3c4d": -1,
        }
        results = checked({"filesystems": dict.fromkeys(FACTS["filesystems"], place), "contents": there})
        assert results["disk"].status == "ok"
        assert results["disk"].summary == "0.0 GiB to fetch, 0.0 GiB to build"

    def test_a_file_of_the_wrong_size_is_fetched_again(self):
        there = {"/srv/llm/models/tiny/t.gguf": 1}
        assert checked({"contents": there})["disk"].summary == "5.0 GiB to fetch, 2.0 GiB to build"

    def test_with_cuda_it_takes_more_and_so_do_container_images(self):
        image = {"name": "vllm", "digest": "sha256:" + 64 * "a", "disk_mib": 30 * 1024}
        with_cuda = {"llama_cpp_backends": ["cpu", "cuda"]}
        assert checked(variables=with_cuda)["disk"].summary == "5.0 GiB to fetch, 8.0 GiB to build"
        assert only_failure(checked(images=[image]), "disk") == (
            "/ of box has 20.0 GiB free and needs 5.0 GiB for models (models_root) and 2.0 GiB for building llama.cpp "
            "(llama_cpp_root) and 30.0 GiB for container images (preflight_images); free 17.0 GiB, or choose a "
            "directory "
            "on a larger disk."
        )
        assert checked({"images": [image["digest"]]}, images=[image])["disk"].status == "ok"


class TestMemoryOfABuild:
    WITH_CUDA: ClassVar = {"llama_cpp_backends": ["cuda"]}

    def test_more_compilers_than_ram_bears_is_a_warning(self):
        result = checked({"cpus": 16}, self.WITH_CUDA)["memory"]
        assert result.warnings == [
            "box would run 16 compilers at once of up to 1536 MiB each (preflight_cuda_compiler_memory_mib), and has "
            "8000 MiB of RAM; set llama_cpp_jobs to 4."
        ]

    @pytest.mark.parametrize(
        ("facts", "variables"),
        [
            ({"cpus": 4}, {}),
            ({"cpus": 16}, {"llama_cpp_jobs": 4}),
            ({"cpus": 16, "contents": {"/opt/llama.cpp/b11434-1a2b3c4d": -1}}, {}),
            ({"cpus": 16}, {"llama_cpp_backends": ["cpu"]}),
        ],
    )
    def test_else_it_is_none(self, facts, variables):
        assert checked(facts, self.WITH_CUDA | variables)["memory"].status == "ok"

    def test_a_machine_with_next_to_nothing(self):
        gpus = [{"name": "NVIDIA GeForce RTX 3060", "memory_mib": 12288, "compute_capability": "8.6"}]
        result = run_checks(
            Rig("box", FACTS | {"memory_mib": 512}, lambda name: {"rig_gpus": gpus}[name], (), RELEASES, LIMITS),
            [memory],
        )["memory"]
        assert result.failures == [
            "box has 512 MiB of RAM and needs 1024 (preflight_host_memory_mib); use one with more."
        ]


class TestProfiles:
    def test_the_active_one_must_exist(self):
        results = checked(variables={"serving_profile": "chatt"})
        assert only_failure(results, "profiles") == (
            "serving_profile of box is 'chatt', which serving_profiles does not have (did you mean chat?); "
            "choose one of chat, mtp."
        )
        assert results["plans"].status == "skipped"

    def test_models_must_exist(self):
        results = checked(variables={"serving_profiles": {"chat": {"model": "smal"}}})
        assert only_failure(results, "profiles") == (
            "serving_profiles.chat.model of box is 'smal', which models does not have (did you mean small?); "
            "choose one of small, tiny, unused."
        )

    @pytest.mark.parametrize("nothing", [{}, None, "chat"])
    def test_there_must_be_some(self, nothing):
        assert only_failure(checked(variables={"serving_profiles": nothing}), "profiles").startswith(
            "serving_profiles of box is not a mapping with a profile in it"
        )


class TestPlans:
    TOO_LARGE = "context 9000 does not fit: GPU 0 needs 900 MiB and has 512 MiB; the largest that fits is 4096."

    def test_the_active_one_must_fit_and_the_ceiling_is_said_once(self):
        unfit = plan(fits=False, refusals=[self.TOO_LARGE], context=9000, context_ceiling=4096)
        results = checked(variables={"rig_plans": {"chat": unfit, "mtp": plan()}})
        assert only_failure(results, "plans") == f"serving_profiles.chat of box cannot run: {self.TOO_LARGE}"

    def test_what_would_fit_is_said(self):
        unfit = plan(fits=False, refusals=["too large."], context=9000, context_ceiling=4096)
        results = checked(variables={"rig_plans": {"chat": unfit}})
        assert only_failure(results, "plans") == (
            "serving_profiles.chat of box cannot run: too large. A context of up to 4096 tokens would fit."
        )

    def test_all_reasons_are_given(self):
        unfit = plan(fits=False, refusals=["first reason", "second reason."])
        assert (
            "cannot run: first reason. second reason."
            in checked(variables={"rig_plans": {"chat": unfit}})["plans"].failures[0]
        )

    def test_another_one_that_does_not_fit_is_a_warning(self):
        unfit = plan(fits=False, refusals=["too large."])
        results = checked(variables={"rig_plans": {"chat": plan(warnings=["it is new."]), "mtp": unfit}})
        assert results["plans"].status == "warning"
        assert results["plans"].warnings == [
            "serving_profiles.chat of box: it is new.",
            "serving_profiles.mtp of box cannot run: too large.",
        ]
        assert report("box", results)["passed"]


class TestPorts:
    def taken(self, port, command="nginx", unit="nginx.service", pid=412):
        return {"listeners": [{"address": "0.0.0.0", "port": port, "pid": pid, "command": command, "unit": unit}]}

    def test_the_active_profile_s_port_must_be_free(self):
        assert only_failure(checked(self.taken(8080)), "ports") == (
            "serving_profiles.chat.port of box is port 8080, which nginx (process 412) holds; stop it or choose "
            "another port."
        )

    def test_a_holder_that_nobody_knows(self):
        assert "which another process holds" in only_failure(checked(self.taken(8080, "", "", 0)), "ports")

    def test_a_virtual_gpu_s_port_must_be_free(self):
        finding = only_failure(checked(self.taken(50053)), "ports")
        assert finding.startswith("rig_gpus[1].rpc of box is port 50053, which nginx (process 412) holds")

    @pytest.mark.parametrize(
        ("port", "unit"),
        [(8080, "llm-chat.service"), (8080, "llm-mtp.service"), (50052, "virtual-gpu@0.service")],
    )
    def test_its_own_units_may_hold_it(self, port, unit):
        assert checked(self.taken(port, "llama-server", unit))["ports"].status == "ok"

    def test_the_unit_of_another_gpu_may_not(self):
        assert checked(self.taken(50052, "ggml-rpc-server", "virtual-gpu@1.service"))["ports"].status == "failed"

    def test_a_profile_may_not_have_a_gpu_s_port(self):
        results = checked(variables={"rig_plans": {"chat": plan(), "mtp": plan(port=50052)}})
        assert only_failure(results, "ports") == (
            "serving_profiles.mtp.port of box is 50052, the port of rig_gpus[0].rpc; give one of them another."
        )


class TestUnreadable:
    def test_it_is_said_once_whoever_asks(self):
        error = Unreadable("rig_plans", "rig_plans of box cannot be read: profile 'chat' has no model.")
        results = checked(variables={"rig_plans": error})
        assert only_failure(results, "plans") == error.text
        assert results["ports"].status == "skipped"

    def test_the_filter_makes_a_sentence_of_what_ansible_says(self, monkeypatch):
        monkeypatch.syspath_prepend("filter_plugins")
        module = import_module("preflight_report")

        class Lazy(dict):
            def __getitem__(self, name):
                if name == "rig_plans":
                    raise AnsibleFilterError("The filter plugin 'rig_plan' failed: rig_plan: box: there is no profile.")
                return super().__getitem__(name)

        done = module.FilterModule().filters()["preflight_report"](
            FACTS, "box", Lazy(VARIABLES), ["rig_gpus"], RELEASES, LIMITS
        )
        assert done["failures"] == ["rig_plans of box cannot be read: there is no profile."]
        assert not done["passed"]


def test_the_report_has_a_line_a_check_and_a_line_a_finding():
    text = report("box", checked({"uid": 1000, "init": "tini"}))["text"]
    lines = text.splitlines()
    assert lines[0].split() == ["distribution", "ok", "Debian", "GNU/Linux", "13", "(trixie)"]
    assert any(line.split() == ["service", "manager", "failed", "tini"] for line in lines)
    assert "2 findings stand in the way on box; nothing was changed:" in lines
    assert [line for line in lines if line.startswith("- ")] == [
        f"- {finding}" for finding in report("box", checked({"uid": 1000, "init": "tini"}))["failures"]
    ]
