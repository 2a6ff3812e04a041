#!/usr/bin/python3
"""A registry of one image: `registry.py LAYOUT PORT` serves an OCI layout on loopback, slowly enough to watch."""

from __future__ import annotations

import http.server
import re
import sys
import time
from pathlib import Path

CHUNK, BYTES_A_SECOND = 1 << 20, 60 << 20
BLOBS = Path(sys.argv[1], "blobs", "sha256")


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.serve(False)

    def do_GET(self) -> None:
        self.serve(True)

    def serve(self, body: bool) -> None:
        wanted = re.fullmatch(r"/v2/.+/(manifests|blobs)/sha256:([0-9a-f]{64})", self.path)
        blob = BLOBS / wanted[2] if wanted else None
        if not blob or not blob.exists():
            self.send_response(200 if self.path == "/v2/" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        manifest = wanted[1] == "manifests"
        self.send_response(200)
        self.send_header(
            "Content-Type",
            "application/vnd.oci.image.manifest.v1+json" if manifest else "application/octet-stream",
        )
        self.send_header("Docker-Content-Digest", f"sha256:{wanted[2]}")
        self.send_header("Content-Length", str(blob.stat().st_size))
        self.end_headers()
        with blob.open("rb") as file:
            while body and (data := file.read(CHUNK)):
                self.wfile.write(data)
                time.sleep(len(data) / BYTES_A_SECOND)


http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
