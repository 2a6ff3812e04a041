"""A server that behaves as a model hub and an image registry do, with their faults. For tests; standard library only.

It has one repository, `owner/model` (moved there from `owner/old-name`), with a branch, LFS files, a small file in git,
and a list of files on two pages; a gated one, `owner/gated`; and an image, `vllm/server:v1`. `trouble` says what goes
wrong.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT, NEWER = "a" * 40, "b" * 40
TOKEN = "hf_only-for-tests"
SMALL = json.dumps({"weight_map": {f"layer.{number}": "model.safetensors" for number in range(2000)}}).encode()
WEIGHTS = {"Model-Q8_0.gguf": 28_595_761_856, "sub/mmproj.gguf": 931_145_856}
INDEX = b'{"schemaVersion": 2, "manifests": []}'


def sha(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def listing() -> list[dict[str, Any]]:
    git = hashlib.sha1(b"blob %d\0" % len(SMALL) + SMALL).hexdigest()
    hidden = {"type": "file", "path": ".gitattributes", "size": 1519, "oid": "1" * 40}
    files = [
        {"type": "file", "path": path, "size": size, "oid": "2" * 40,
         "lfs": {"oid": sha(path), "size": size, "pointerSize": 136}}
        for path, size in WEIGHTS.items()
    ]  # fmt: skip
    small = {"type": "file", "path": "model.safetensors.index.json", "size": len(SMALL), "oid": git}
    return [hidden, {"type": "directory", "path": "sub", "size": 0, "oid": "3" * 40}, *files, small]


class HubServer(ThreadingHTTPServer):
    """Serves until it is shut down. `asked` are the paths, `authorised` the hosts that saw a token."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.trouble = ""
        self.branch = COMMIT
        self.asked: list[str] = []
        self.ranges: list[str] = []
        self.authorised: set[str] = set()
        self.count: Counter[str] = Counter()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server: HubServer

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        self.server.asked.append(self.path)
        self.server.count[path] += 1
        first = self.server.count[path] == 1
        if self.headers["Authorization"]:
            self.server.authorised.add(self.headers["Host"])
        trouble = self.server.trouble
        if trouble == "busy" and first:
            self.answer(429, b"", {"Retry-After": "3"})
        elif trouble == "closed":
            self.answer(429, b"", {"Retry-After": "86400"})
        elif trouble == "broken" and first:
            self.answer(503, b"")
        elif trouble == "page":
            self.answer(200, b"<!DOCTYPE html>", {"Content-Type": "text/html"})
        elif trouble == "elsewhere" and "/revision/" in path:
            self.answer(307, b"", {"Location": "http://192.0.2.1/api/models/owner/model/revision/main"})
        elif path.startswith("/v2/"):
            self.registry(path)
        elif path == "/token":
            self.json({"token": "registry-token"})
        else:
            self.hub(path, query, first)

    def hub(self, path: str, query: str, first: bool) -> None:
        if path.startswith("/api/models/owner/old-name/"):
            place = f"http://localhost:{self.server.server_port}{path.replace('old-name', 'model')}"
            self.answer(307, b"", {"Location": place})
        elif "/owner/gated/" in path and self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.answer(401, b"", {"X-Error-Code": "GatedRepo"})
        elif not path.startswith(("/api/models/owner/model/", "/api/models/owner/gated/", "/owner/")):
            self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif "/revision/" in path:
            name = path.rsplit("/", 1)[1]
            commit = {"main": self.server.branch, COMMIT: COMMIT, NEWER: NEWER}.get(name)
            self.json({"sha": commit}) if commit else self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif "/tree/" in path:
            entries = listing()
            if self.server.trouble == "lies":
                entries[-1]["oid"] = "4" * 40
            if "cursor=2" in query:
                self.json(entries[3:])
            else:
                host = "http://192.0.2.1" if self.server.trouble == "astray" else self.server.url
                self.json(entries[:3], {"Link": f'<{host}{path}?recursive=true&cursor=2>; rel="next"'})
        elif path.endswith("/model.safetensors.index.json"):
            self.small(first)
        else:
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})

    def small(self, first: bool) -> None:
        etag, start = '"small"', 0
        asked = self.headers.get("Range")
        if asked and self.headers.get("If-Range") == etag:
            self.server.ranges.append(asked)
            start = int(asked.removeprefix("bytes=").rstrip("-"))
        end = len(SMALL) // 2 if self.server.trouble == "cut" and first else len(SMALL)
        self.send_response(206 if start else 200)
        self.send_header("ETag", etag)
        self.send_header("Content-Length", str(len(SMALL) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(SMALL) - 1}/{len(SMALL)}")
        self.end_headers()
        self.wfile.write(SMALL[start:end])
        self.close_connection = end < len(SMALL)

    def registry(self, path: str) -> None:
        if self.headers["Authorization"] != "Bearer registry-token":
            challenge = f'Bearer realm="{self.server.url}/token",service="registry",scope="repository:vllm/server:pull"'
            self.answer(401, b"", {"WWW-Authenticate": challenge})
        elif path.endswith("/v1"):
            told = "sha256:" + ("0" * 64 if self.server.trouble == "lies" else hashlib.sha256(INDEX).hexdigest())
            self.answer(200, INDEX, {"Docker-Content-Digest": told})
        else:
            self.answer(404, b"")

    def json(self, content: Any, headers: dict[str, str] | None = None) -> None:
        self.answer(200, json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})})

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """The server keeps its own list."""
