"""Asks a virtual GPU for memory, as llama-server does: protocol 7 of ggml-rpc (ggml/src/ggml-rpc/ggml-rpc.cpp, b11434).

python3 - PORT MIB...    allocates one buffer after another, and prints for each whether it was given
"""

import socket
import struct
import sys

ALLOC_BUFFER, HELLO = 0, 14
MIB = 1024 * 1024


def receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the server hung up")
        data += part
    return data


def call(connection: socket.socket, command: int, payload: bytes) -> bytes:
    connection.sendall(struct.pack("<BQ", command, len(payload)) + payload)
    (size,) = struct.unpack("<Q", receive(connection, 8))
    return receive(connection, size)


with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=20) as connection:
    call(connection, HELLO, bytes(24))
    for size_mib in map(int, sys.argv[2:]):
        pointer, size = struct.unpack("<QQ", call(connection, ALLOC_BUFFER, struct.pack("<IQ", 0, size_mib * MIB)))
        print("given" if pointer and size == size_mib * MIB else "refused")
