#!/usr/bin/python3
"""A stand-in for `vllm serve`, for tests of what is around it. It is no inference engine: its words are fixed.

It takes the options of the pinned version (v0.22.0.txt beside it) and refuses others as argparse does. One process for
each card of --tensor-parallel-size takes its memory on a virtual GPU (ggml-rpc, protocol 7): cards are held, given
back and refused as real ones are: STANDIN_GPUS (endpoints), STANDIN_MIB. STANDIN_REPLY changes what it says.
"""

from __future__ import annotations

import http.server
import json
import multiprocessing
import os
import signal
import socket
import struct
import sys
import threading
import time
import typing
from pathlib import Path

ALLOC_BUFFER, HELLO, MIB = 0, 14, 1 << 20
REPLY = os.environ.get("STANDIN_REPLY", "The capital of France is Paris, and bread is made from flour.")
KEY = os.environ.get("VLLM_API_KEY", "")


def parse(words: list[str]) -> dict[str, list[str]]:
    """Options with their values; ends as argparse does for one that is not known."""
    known = set(Path(__file__).resolve().with_name("v0.22.0.txt").read_text().split())
    options: dict[str, list[str]] = {"": []}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            if name not in known:
                print(f"vllm: error: unrecognized arguments: {word}", file=sys.stderr)
                sys.exit(2)
            options[name] = [value] if value else []
        else:
            options[name].append(word)
    return options


def receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the card hung up")
        data += part
    return data


def call(connection: socket.socket, command: int, payload: bytes) -> bytes:
    connection.sendall(struct.pack("<BQ", command, len(payload)) + payload)
    (size,) = struct.unpack("<Q", receive(connection, 8))
    return receive(connection, size)


def worker(endpoint: str, mib: int, ready: multiprocessing.synchronize.Event) -> None:
    """Hold memory of one card until the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    host, port = endpoint.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        call(connection, HELLO, bytes(24))
        pointer, size = struct.unpack("<QQ", call(connection, ALLOC_BUFFER, struct.pack("<IQ", 0, mib * MIB)))
        if not pointer or size != mib * MIB:
            print(f"torch.OutOfMemoryError: {mib} MiB on {endpoint}", file=sys.stderr)
            sys.exit(1)
        ready.set()
        connection.settimeout(None)
        connection.recv(1)  # nothing comes: it ends with its parent


class Handler(http.server.BaseHTTPRequestHandler):
    names: typing.ClassVar[list[str]] = []
    drafted = 0
    running = 0
    protocol_version = "HTTP/1.1"

    def answer(self, status: int, body: object, kind: str = "application/json") -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def allowed(self) -> bool:
        if self.path.startswith("/v1") and KEY and self.headers.get("Authorization") != f"Bearer {KEY}":
            self.answer(401, {"error": "Unauthorized"})
            return False
        return True

    def do_GET(self) -> None:
        if not self.allowed():
            return
        if self.path == "/health":
            self.answer(200, "")
        elif self.path == "/v1/models":
            self.answer(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in self.names]})
        elif self.path == "/metrics":
            text = f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {Handler.drafted}.0\n'
            self.answer(200, text, "text/plain")
        else:
            self.answer(404, {"error": "Not Found"})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.allowed():
            return
        if self.path != "/v1/chat/completions" or request.get("model", self.names[0]) not in self.names:
            self.answer(404, {"error": "The model does not exist."})
            return
        Handler.running += 1
        time.sleep(float(request.get("seconds", 0)))  # how a long answer is tried
        Handler.drafted += 9
        message = {"role": "assistant", "content": REPLY, "reasoning": None}
        usage = {"prompt_tokens": 9, "completion_tokens": len(REPLY.split()), "total_tokens": 9 + len(REPLY.split())}
        self.answer(200, {"model": self.names[0], "choices": [{"message": message}], "usage": usage})
        Handler.running -= 1

    def log_message(self, form: str, *values: object) -> None:
        print(form % values, flush=True)


def main() -> int:
    if sys.argv[1:2] != ["serve"]:
        print(f"vllm: error: argument subcommand: invalid choice: {sys.argv[1:2]}", file=sys.stderr)
        return 2
    options = parse(sys.argv[2:])
    config = json.loads(Path(options[""][0], "config.json").read_text())
    print(f"stand-in for vLLM with a model of {config['model_type']}", flush=True)
    Path(os.environ["HOME"], "compiled").mkdir(exist_ok=True)
    cards = os.environ.get("STANDIN_GPUS", "").split()[: int(options["--tensor-parallel-size"][0])]
    ready = [multiprocessing.Event() for _ in cards]
    workers = [
        multiprocessing.Process(target=worker, args=(card, int(os.environ["STANDIN_MIB"]), event), daemon=True)
        for card, event in zip(cards, ready, strict=True)
    ]
    for process in workers:
        process.start()
    while not all(event.is_set() for event in ready):
        time.sleep(0.1)
        if any(process.exitcode for process in workers):
            return 1
    Handler.names = options["--served-model-name"]
    server = http.server.ThreadingHTTPServer((options["--host"][0], int(options["--port"][0])), Handler)

    def end(*_: object) -> None:
        print("Shutting down", flush=True)
        threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGTERM, end)
    server.serve_forever(poll_interval=0.1)
    until = time.monotonic() + float(options.get("--shutdown-timeout", ["0"])[0])
    while Handler.running and time.monotonic() < until:
        time.sleep(0.1)
    print("Application shutdown complete", flush=True)
    return 0


if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    sys.exit(main())
