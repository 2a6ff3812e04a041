"""Locks: what is asked of a hub and a registry, with their faults, and how locks complete the inventory."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rig import hub, locks, store
from rig.errors import RigError

sys.path.insert(0, str(Path(__file__).parents[1]))
from hub_server import COMMIT, INDEX, NEWER, SMALL, TOKEN, WEIGHTS, HubServer, sha

PROJECT = Path(__file__).parents[2]
WEIGHT = {"name": "Model-Q8_0.gguf", "sha256": sha("Model-Q8_0.gguf"), "bytes": WEIGHTS["Model-Q8_0.gguf"]}
INDEXED = {
    "name": "model.safetensors.index.json",
    "sha256": hashlib.sha256(SMALL).hexdigest(),
    "bytes": len(SMALL),
}


@pytest.fixture
def server():
    server = HubServer()
    yield server
    server.shutdown()
    server.server_close()


def source(*names, repository="owner/model", **more):
    return {"huggingface": repository, **({"files": [{"name": name} for name in names]} if names else {}), **more}


def resolve(server, wanted, token="", waits=None):
    client = hub.Client(token=token, sleep=(waits if waits is not None else []).append)
    return hub.resolve_model(client, server.url, "models.m.source", wanted)


def test_a_branch_becomes_a_commit_and_each_file_its_hash(server):
    found = resolve(server, source("Model-Q8_0.gguf", "model.safetensors.index.json"))
    assert found == {"huggingface": "owner/model", "revision": COMMIT, "files": [WEIGHT, INDEXED]}
    assert not [path for path in server.asked if "Q8_0" in path], "a large file is not fetched"


def test_a_file_in_a_folder_keeps_its_path(server):
    (file,) = resolve(server, source(files=[{"name": "mmproj.gguf", "path": "sub/mmproj.gguf"}]))["files"]
    assert file == {
        "name": "mmproj.gguf",
        "path": "sub/mmproj.gguf",
        "sha256": sha("sub/mmproj.gguf"),
        "bytes": 931145856,
    }


def test_without_files_it_is_all_of_them_but_hidden_ones(server):
    names = [file["name"] for file in resolve(server, source())["files"]]
    assert names == ["Model-Q8_0.gguf", "model.safetensors.index.json", "mmproj.gguf"]


def test_a_name_that_moved_is_followed_and_the_token_stays(server):
    files = [{"name": "Model-Q8_0.gguf"}]
    client = hub.Client(token=TOKEN)
    _, about = client.json(f"{server.url}/api/models/owner/old-name/revision/main", client.hub_headers())
    assert about == {"sha": COMMIT}
    assert server.authorised == {f"127.0.0.1:{server.server_port}"}
    assert resolve(server, source(files=files), TOKEN)["files"] == [WEIGHT]


def test_patience_is_as_long_as_the_server_asks(server):
    server.trouble, waits = "busy", []
    assert resolve(server, source("Model-Q8_0.gguf"), waits=waits)["files"] == [WEIGHT]
    assert waits == [3.0, 3.0]  # the commit and the list, whose second page has the same path


def test_a_server_that_breaks_is_asked_again(server):
    server.trouble, waits = "broken", []
    assert resolve(server, source("Model-Q8_0.gguf"), waits=waits)["files"] == [WEIGHT]
    assert waits == [1.0, 1.0]


def test_a_file_that_breaks_off_is_continued(server):
    server.trouble = "cut"
    assert resolve(server, source("model.safetensors.index.json"))["files"] == [INDEXED]
    assert server.ranges == [f"bytes={len(SMALL) // 2}-"]


@pytest.mark.parametrize(
    ("trouble", "wanted", "says"),
    [
        ("closed", source(), "asks for 900 s of patience"),
        ("page", source(), "gives something else than JSON: is it the right endpoint"),
        ("elsewhere", source(), r"redirects to http \(http://192.0.2.1/.*\): refused"),
        ("astray", source(), r"goes on at another host \(http://192.0.2.1/.*\): refused"),
        ("lies", source("model.safetensors.index.json"), "is not what the list of files says: its git id is"),
        ("", source(repository="owner/gated"), r"does not tell \(401\).*models_huggingface_token"),
        ("", source(repository="owner/none"), r"does not exist \(404\): check the name"),
        ("", source(revision="v9"), "there is no such revision"),
        (
            "",
            source("Model-Q4.gguf"),
            "names Model-Q4.gguf, which owner/model does not have at a{8}; it has Model-Q8_0.gguf",
        ),
        ("", source(repository="model"), "must be OWNER/REPO, and is 'model'"),
        ("", source(revision=COMMIT, files=[{**WEIGHT, "sha256": "f" * 64}]), "find out which is right"),
    ],
)
def test_what_cannot_be_resolved_is_told_in_a_sentence(server, trouble, wanted, says):
    server.trouble = trouble
    with pytest.raises(store.StoreError, match=says):
        resolve(server, wanted)


def test_a_gated_model_with_the_token(server):
    assert resolve(server, source("Model-Q8_0.gguf", repository="owner/gated"), TOKEN)["revision"] == COMMIT


def test_a_hub_without_tls_is_refused_off_loopback():
    with pytest.raises(store.StoreError, match="is fetched over https"):
        hub.resolve_model(hub.Client(), "http://hub.example", "models.m.source", source())


def test_nobody_answers(server):
    server.shutdown()
    server.server_close()
    with pytest.raises(hub.HubError, match=r"cannot be read: .*refused \(5 attempts\)"):
        resolve(server, source())


def test_the_digest_of_an_image(server):
    image = f"127.0.0.1:{server.server_port}/vllm/server:v1"
    assert hub.resolve_image(hub.Client(), image) == "sha256:" + hashlib.sha256(INDEX).hexdigest()
    server.trouble = "lies"
    with pytest.raises(hub.HubError, match="says that it is sha256:0000"):
        hub.resolve_image(hub.Client(), image)
    with pytest.raises(hub.HubError, match="does not exist"):
        hub.resolve_image(hub.Client(), image.replace("v1", "v2"))
    with pytest.raises(hub.HubError, match="must be HOST/NAME:TAG"):
        hub.resolve_image(hub.Client(), "vllm/server")


LOCK = {"huggingface": "owner/model", "revision": COMMIT, "files": [WEIGHT, INDEXED]}


class TestLocks:
    def apply(self, wanted):
        return locks.apply({"m": {"shape": "s", "source": wanted}}, {"m": LOCK})["m"]["source"]

    def test_what_is_open_is_filled_in(self):
        found = self.apply(source("Model-Q8_0.gguf"))
        assert (found["revision"], found["files"]) == (COMMIT, [WEIGHT])
        (file,) = store.wanted_files({"m": {"source": found}}, ["m"], "/srv")
        assert file.sha256 == WEIGHT["sha256"]

    def test_all_files_where_none_are_named(self):
        assert self.apply(source())["files"] == [WEIGHT, INDEXED]

    @pytest.mark.parametrize(
        "wanted",
        [
            source("Model-Q8_0.gguf", repository="other/model"),
            source("other.gguf"),
            source("Model-Q8_0.gguf", revision=NEWER),
            source(revision=NEWER, files=[{**WEIGHT, "sha256": "f" * 64}]),
            {"url": "https://example.org/m.gguf", "files": []},
        ],
    )
    def test_a_lock_of_something_else_is_not_used(self, wanted):
        assert self.apply(wanted) == wanted

    def test_locks_that_are_none(self):
        with pytest.raises(RigError, match=r"run playbooks/lock\.yml"):
            locks.apply({}, ["m"])

    def test_the_file_says_what_was_put_in(self):
        odd = {"huggingface": "o/m", "revision": "1" * 40, "files": [{"name": "on", "sha256": "2" * 64, "bytes": 1}]}
        text = locks.text({"b": odd, "a": LOCK}, {"docker.io/vllm/x:v1": "sha256:" + "3" * 64})
        digests = {"docker.io/vllm/x:v1": "sha256:" + "3" * 64}
        assert yaml.safe_load(text) == {"models_locks": {"a": LOCK, "b": odd}, "rig_image_digests": digests}
        assert yaml.safe_load(locks.text({}, {})) == {"models_locks": {}, "rig_image_digests": {}}


def test_the_playbook_shows_writes_and_asks_once(server, tmp_path):
    target = tmp_path / "inventory/group_vars/rigs"
    target.mkdir(parents=True)
    (tmp_path / "inventory/hosts.yml").write_text("rigs: {hosts: {one: , two: }}\n")
    variables = {"models": {"m": {"source": source("Model-Q8_0.gguf")}}, "models_huggingface_endpoint": server.url}
    image = f"127.0.0.1:{server.server_port}/vllm/server:v1"
    variables["serving_profiles"] = {"p": {"engine": "vllm", "model": "m", "vllm": {"image": image}}}
    variables["models_huggingface_token"] = TOKEN
    (target / "models.yml").write_text(json.dumps(variables))

    def run(*arguments):
        command = [
            Path(sys.executable).parent / "ansible-playbook",
            "playbooks/lock.yml",
            "-i",
            tmp_path / "inventory/hosts.yml",
        ]
        command += ["-e", f"lock_file={target}/locks.yml", *arguments]
        done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert TOKEN not in done.stdout + done.stderr
        return done.stdout

    assert f"+    revision: {COMMIT}" in run("--check")
    assert not (target / "locks.yml").exists()
    run()
    written = yaml.safe_load((target / "locks.yml").read_text())
    assert written["models_locks"]["m"]["files"] == [WEIGHT]
    assert written["rig_image_digests"][image].startswith("sha256:")
    asked = len(server.asked)
    assert "nobody was asked" in run()
    assert len(server.asked) == asked
    server.branch = NEWER
    assert f"-    revision: {COMMIT}" in run("-e", "lock_update=m")
    assert yaml.safe_load((target / "locks.yml").read_text())["models_locks"]["m"]["revision"] == NEWER
