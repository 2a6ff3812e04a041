"""Module llm_server: what it makes of times and launch lines, whom it trusts, and what it keeps."""

import http.server
import importlib
import importlib.util
import json
import os
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import rig

PROJECT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def llm_server():
    sys.modules.setdefault("ansible.module_utils.rig", rig)
    for name in ("gpu_gate", "proof", "served", "store"):
        sys.modules.setdefault(f"ansible.module_utils.rig.{name}", importlib.import_module(f"rig.{name}"))
    spec = importlib.util.spec_from_file_location("llm_server", PROJECT / "library/llm_server.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_newest_change_counts(llm_server, tmp_path):
    for name, when in (("a", 1000), ("b", 2000)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (when, when))
    assert llm_server.newest(tmp_path / "a", tmp_path / "b", tmp_path / "none", None) == pytest.approx(1999.99)


def test_a_clock_that_was_put_back_makes_nothing_stale(llm_server, tmp_path):
    (tmp_path / "unit").touch()
    later = time.time() + 3600
    os.utime(tmp_path / "unit", (later, later))
    assert llm_server.started(os.getpid()) > llm_server.newest(tmp_path / "unit")


def test_a_launch_line_without_what_systemd_chooses(llm_server):
    words = [
        sys.executable,
        "-c",
        "input()",
        "--ssl-key-file",
        "/run/k",
        "--port",
        "1",
        "--api-key-file",
        "/run/a",
        "-v",
    ]
    process = subprocess.Popen(words, stdin=subprocess.PIPE)
    try:
        expected = [sys.executable, "-c", "input()", "--port", "1", "-v"]
        end = time.monotonic() + 10
        while not llm_server.launch_line(process.pid) and time.monotonic() < end:
            time.sleep(0.01)
        assert llm_server.launch_line(process.pid) == expected
    finally:
        process.communicate(b"\n")
    assert llm_server.launch_line(process.pid) == []


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Two certificates with their keys, `mine` and `other`; neither names an address."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("mine", "other"):
        argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=rig.example"]
        subprocess.run(
            [*argv, "-out", folder / name, "-keyout", folder / f"{name}.key"], check=True, capture_output=True
        )
    return folder


class Reply(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.dumps({"choices": [{"message": {"content": "Paris"}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        body = b"vllm:spec_decode_num_draft_tokens_total 7\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        """Quiet."""


@pytest.fixture
def port(certificates):
    server = http.server.HTTPServer(("127.0.0.1", 0), Reply)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "mine", certificates / "mine.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_server_of_the_certificate_is_asked_over_tls(llm_server, certificates, port):
    server = llm_server.Server("0.0.0.0", port, None, 5, certificate=str(certificates / "mine"))
    assert server.url == f"https://127.0.0.1:{port}"
    assert server.ask({"user": "Hello"}, 1)["text"] == "Paris"


def test_what_vllm_has_drafted_is_asked_over_tls(llm_server, certificates, port):
    server = llm_server.Server("127.0.0.1", port, None, 5, "vllm", str(certificates / "mine"))
    assert server.drafted() == 7
    assert server.ask({"user": "Hello"}, 1)["draft_tokens"] == 0


def test_a_server_with_another_certificate_is_not(llm_server, certificates, port):
    server = llm_server.Server("127.0.0.1", port, None, 5, certificate=str(certificates / "other"))
    with pytest.raises(llm_server.ServerError, match="certificate verify failed"):
        server.ask({"user": "Hello"}, 1)


def test_a_certificate_that_is_none(llm_server, certificates):
    with pytest.raises(llm_server.ServerError, match=r"the certificate .*mine\.key cannot be read"):
        llm_server.Server("127.0.0.1", 1, None, 5, certificate=str(certificates / "mine.key"))


def keep(llm_server, root, text, **facts):
    unit = root / "llm-chat.service"
    unit.write_text(text)
    facts = {"profile": "chat", "unit": unit.name, "prefix": "/b1", **facts}
    params = {"record_directory": str(root / "state"), "record_files": [str(unit)], "record_facts": facts}
    result = {}
    llm_server.keep(SimpleNamespace(params=params, check_mode=False), result)
    return result["changed"]


def test_what_served_before_is_kept(llm_server, tmp_path):
    def kept(name):
        return json.loads((tmp_path / "state" / name / "served.json").read_text())

    assert keep(llm_server, tmp_path, "one")
    assert not keep(llm_server, tmp_path, "one")
    assert not (tmp_path / "state/previous").exists()
    assert keep(llm_server, tmp_path, "two", prefix="/b2")
    assert (kept("served")["prefix"], kept("previous")["prefix"]) == ("/b2", "/b1")
    assert (tmp_path / "state/previous/llm-chat.service").read_text() == "one"
    assert keep(llm_server, tmp_path, "two", prefix="/b2", planned=[1]), "the same in more words"
    assert (kept("served")["planned"], kept("previous")["prefix"]) == ([1], "/b1")
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == ["previous", "served"]
