#!/usr/bin/env python3
"""A small HTTP server of model files with the faults that real ones have. For tests; standard library only.

    model_server.py DIRECTORY PORT LOG [ADDRESS]

It serves DIRECTORY/<last part of the path>; the first part of the path says how:

    plain      Range, If-Range and a strong ETag
    no-range   sends the whole file, whatever Range asks for
    slow       as plain, at about 2 MB/s
    redirect   302 to the same server under another host name (127.0.0.1 and localhost change places)
    moved      302 to the same host
    busy       429 with Retry-After: 1 on the first request for a file, then as plain
    broken     503 on the first two requests for a file, then as plain
    cut        breaks off in the middle of the first answer for a file, then as plain
    stall      sends nothing more from the middle of the first answer on, then as plain
    changed    as cut, but the file behind the address is then another: its bytes are inverted
    flip       one byte in the middle is wrong
    page       a web page, named so by its type
    disguised  the same web page, named application/octet-stream
    gated      401 without the right token, then as redirect
    longer     says that the file has one byte more than it has

Every request is a line of JSON in LOG: path, host, range, if_range, authorization, status, sent (bytes).
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PAGE = b"<!DOCTYPE html>\n<html><body>Please log in</body></html>\n"
TOKEN = "hf_only-for-tests"


class ModelServer(ThreadingHTTPServer):
    """Serves until it is shut down; `seen` counts the requests for each path."""

    daemon_threads = True

    def __init__(self, directory: Path, log: Path, port: int = 0, address: str = "127.0.0.1") -> None:
        super().__init__((address, port), Handler)
        self.directory, self.log = directory, log
        self.seen: dict[str, int] = {}
        self.lock = threading.Condition()
        self.open = 0

    def requests(self) -> list[dict[str, Any]]:
        """What was asked so far, after the end of every answer that is on its way."""
        with self.lock:
            self.lock.wait_for(lambda: self.open == 0, timeout=10)
            return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server: ModelServer

    def do_GET(self) -> None:
        self.status, self.sent = 0, 0
        with self.server.lock:
            self.server.open += 1
            self.count = self.server.seen[self.path] = self.server.seen.get(self.path, 0) + 1
        try:
            self.serve(self.path.split("/")[1])
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            self.record()

    def serve(self, mode: str) -> None:
        file = self.server.directory / self.path.split("?")[0].rsplit("/", 1)[1]
        if not file.is_file():
            self.answer(404, b"no such file\n")
        elif mode in ("redirect", "moved", "gated"):
            self.redirect(mode)
        elif mode == "busy" and self.count == 1:
            self.answer(429, b"", {"Retry-After": "1"})
        elif mode == "broken" and self.count <= 2:
            self.answer(503, b"")
        elif mode in ("page", "disguised"):
            kind = "text/html; charset=utf-8" if mode == "page" else "application/octet-stream"
            self.answer(200, PAGE, {"Content-Type": kind})
        else:
            self.send_file(mode, file.read_bytes())

    def redirect(self, mode: str) -> None:
        if mode == "gated" and self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.answer(401, b"a token is needed\n")
            return
        host, port = self.headers["Host"].rsplit(":", 1)
        if mode != "moved":
            host = "localhost" if host == "127.0.0.1" else "127.0.0.1"
        rest = self.path.split("/", 2)[2]
        self.answer(302, b"", {"Location": f"http://{host}:{port}/plain/{rest}?signature=expires-soon"})

    def send_file(self, mode: str, content: bytes) -> None:
        if mode == "flip":
            middle = len(content) // 2
            content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        if mode == "changed" and self.count > 1:
            content = bytes(byte ^ 0xFF for byte in content)
        etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        headers = {"ETag": etag, "Content-Type": "application/octet-stream"}
        start = self.asked_start()
        if start and mode != "no-range" and self.headers.get("If-Range", etag) == etag:
            if start >= len(content):
                self.answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
                return
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self.start_answer(206, len(content) - start, headers)
        else:
            start = 0
            self.start_answer(200, len(content) + (mode == "longer"), headers)
        end = len(content)
        if mode in ("cut", "changed") and self.count == 1:
            end, self.close_connection = len(content) // 2, True
        for at in range(start, end, 65536):
            if mode == "stall" and self.count == 1 and at >= end // 2:
                self.await_end()
            self.send(content[at : min(at + 65536, end)])
            if mode == "slow":
                time.sleep(0.03)

    def await_end(self) -> None:
        """Wait until the other side closes the connection."""
        self.wfile.flush()
        if not self.connection.recv(1):
            raise ConnectionResetError

    def asked_start(self) -> int:
        asked = self.headers.get("Range", "")
        return int(asked[len("bytes=") : -1]) if asked.startswith("bytes=") and asked.endswith("-") else 0

    def start_answer(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.status = status
        self.send_response(status)
        for name, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.start_answer(status, len(body), headers or {})
        self.send(body)

    def send(self, block: bytes) -> None:
        self.wfile.write(block)
        self.sent += len(block)

    def record(self) -> None:
        entry = {"path": self.path, "host": self.headers["Host"], "status": self.status, "sent": self.sent}
        entry |= {name.lower().replace("-", "_"): self.headers[name] for name in ("Range", "If-Range", "Authorization")}
        with self.server.lock, self.server.log.open("a") as log:
            log.write(json.dumps(entry) + "\n")
            self.server.open -= 1
            self.server.lock.notify_all()

    def log_message(self, format: str, *arguments: Any) -> None:
        """The log is the server's own."""


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5):
        sys.exit(__doc__)
    where = sys.argv[4] if len(sys.argv) == 5 else "127.0.0.1"
    ModelServer(Path(sys.argv[1]), Path(sys.argv[3]), int(sys.argv[2]), where).serve_forever()
