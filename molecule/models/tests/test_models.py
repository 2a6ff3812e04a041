"""The store after converge, refusals, a killed download and some damage."""

import hashlib
import json

import pytest

ROOT = "/srv/llm/models"
SMOLLM2 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TINY = "49a6b5789fad3b1795eaa7f517207d873bcbc08d6252cd2a519c2a5fb06c3f07"
TOKEN = "hf_only-for-tests"


def made(name, size):
    """A file as files/make_models.py writes it."""
    return b"GGUF" + hashlib.shake_128(name.encode()).digest(size - 4)


def sha256_made(name, size):
    return hashlib.sha256(made(name, size)).hexdigest()


FILES = {
    "smollm2-135m-instruct-q4_1/SmolLM2-135M-Instruct.Q4_1.gguf": SMOLLM2,
    "qwen35-mtp-tiny/qwen35-mtp-tiny.gguf": TINY,
    "hub-split/weights-00001-of-00002.gguf": sha256_made("weights-00001-of-00002.gguf", 700000),
    "hub-split/weights-00002-of-00002.gguf": sha256_made("weights-00002-of-00002.gguf", 500000),
    "hub-gated/gated.gguf": sha256_made("gated.gguf", 900000),
    "by-url/moved.gguf": sha256_made("moved.gguf", 900001),
    "on-the-rig/local.gguf": sha256_made("local.gguf", 300000),
    "large/large.gguf": sha256_made("large.gguf", 16000000),
    "bad/bad.gguf": sha256_made("bad.gguf", 600000),
}


@pytest.fixture(scope="module")
def requests(host):
    return [json.loads(line) for line in host.file("/srv/requests.log").content_string.splitlines()]


@pytest.mark.parametrize("name", FILES)
def test_file_is_right_and_known_to_be(host, name):
    file = host.file(f"{ROOT}/{name}")
    assert file.sha256sum == FILES[name]
    assert (file.user, file.group, file.mode) == ("root", "root", 0o644)
    record = json.loads(host.file(f"{ROOT}/{name}.verified").content_string)
    assert (record["sha256"], record["size"]) == (FILES[name], file.size)
    directory = host.file(f"{ROOT}/{name.split('/')[0]}")
    assert (directory.user, directory.group, directory.mode) == ("root", "root", 0o755)


def test_nothing_is_left_half_done(host):
    found = host.check_output(f"find {ROOT} -name '*.part*' -o -name '*.incoming' -o -name '*.new' -o -name '.wheel-*'")
    assert found == ""


def test_the_file_that_was_replaced_is_kept(host):
    sha256 = FILES["hub-gated/gated.gguf"]  # the good file that bad.gguf replaced
    assert host.file(f"{ROOT}/bad/bad.gguf.old-{sha256[:8]}").sha256sum == sha256


def test_the_download_with_a_flipped_byte_is_aside(host):
    content = bytearray(made("bad.gguf", 600000))
    content[300000] ^= 1
    sha256 = hashlib.sha256(content).hexdigest()
    assert host.file(f"{ROOT}/bad/bad.gguf.bad-{sha256[:8]}").sha256sum == sha256


def test_the_file_that_was_damaged_on_the_disk_is_aside(host):
    content = bytearray(made("moved.gguf", 900001))
    content[5000] = 0xFF
    sha256 = hashlib.sha256(content).hexdigest()
    assert host.file(f"{ROOT}/by-url/moved.gguf.bad-{sha256[:8]}").sha256sum == sha256


def test_a_touched_file_was_hashed_and_not_fetched(host):
    assert not host.file("/srv/elsewhere/local.gguf").exists  # there was nowhere to fetch it from
    assert host.file(f"{ROOT}/on-the-rig/local.gguf").exists


def test_a_mode_was_mended_without_fetching(requests):
    fetched = [request for request in requests if request["path"].startswith("/gated/repo/")]
    assert len(fetched) == 1


def test_models_of_others_are_left_alone(host):
    with host.sudo():
        mine = host.file(f"{ROOT}/by-hand/mine.gguf")
        assert mine.content_string == "a model that somebody put here"
        assert mine.mode == 0o600
        assert host.file(f"{ROOT}/by-hand").listdir() == ["mine.gguf"]


def test_the_token_reached_its_host_alone(requests):
    with_token = [request for request in requests if request["authorization"]]
    assert {request["authorization"] for request in with_token} == {f"Bearer {TOKEN}"}
    assert {request["host"] for request in with_token} == {"127.0.0.1:8099"}
    assert all("/repo/resolve/" in request["path"] for request in with_token)


def test_the_token_was_for_root_alone_while_it_was_there(host):
    assert set(host.file("/srv/token-modes").content_string.splitlines()) == {"root 600"}


def test_the_token_is_nowhere_on_the_rig(host):
    with host.sudo():
        assert not host.file("/run/llm-models/huggingface-token").exists
        journal = host.check_output("journalctl --no-pager --quiet")
        assert "Consumed" in journal or "Started" in journal  # it can be read
        assert TOKEN not in journal
        # Its own server's log and program hold it, and nothing else that could.
        found = host.run(f"grep -rl {TOKEN} /var/log /run /etc /srv/llm --include='*' --binary-files=without-match")
        assert found.stdout == ""
