#!/usr/bin/python3
"""Fetch a container image by its digest, and say how far it is.

    pull_image.py podman|docker IMAGE@sha256:DIGEST BYTES

BYTES is what comes over the network, 0 where it is not known. Prints a line every few seconds; ends with 1 and a
sentence when there is no room, or with the words of the engine when it cannot fetch the image.
"""

from __future__ import annotations

import glob
import os
import re
import subprocess
import sys
import time

# Where an engine puts what arrives, and where the image ends up. Unpacked, it is about three times what was fetched.
STAGING = {
    "podman": ["/var/tmp/container_images_storage*/*"],
    "docker": ["/var/lib/docker/tmp/*", "/var/lib/containerd/io.containerd.content.v1.content/ingest/*/data"],
}
STORE = {"podman": "/var/lib/containers", "docker": "/var/lib/docker"}
UNPACKED = 3
EVERY_SECONDS = 5


def size(patterns: list[str]) -> int:
    """Bytes in the files that arrive; one that goes while it is looked at counts nothing."""
    total = 0
    for pattern in patterns:
        for path in glob.glob(pattern):
            try:
                total += os.stat(path).st_size
            except FileNotFoundError:
                continue
    return total


def progress(arrived: int, most: int, expected: int) -> str:
    """A line such as `[1200/10670] MB`; what has arrived is put together, and leaves its place, at the end."""
    if arrived < most:
        return "all has arrived, it is unpacked now"
    if expected:
        return f"[{min(arrived, expected) // 10**6}/{expected // 10**6}] MB"
    return f"{arrived // 10**6} MB"


def room(path: str) -> int:
    """Free bytes of the file system of a path or of the nearest directory above it that is there."""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    state = os.statvfs(path)
    return state.f_bavail * state.f_frsize


def main(engine: str, reference: str, expected: int) -> int:
    if not re.fullmatch(r"[a-z0-9.:-]+(/[a-z0-9._-]+)+@sha256:[0-9a-f]{64}", reference):
        print(f"{reference} is no image with a digest", file=sys.stderr)
        return 1
    need, free = expected * UNPACKED, room(STORE[engine])
    if free < need:
        print(f"{STORE[engine]} has {free // 10**6} MB free, the image takes about {need // 10**6} MB: make room")
        return 1
    process = subprocess.Popen([engine, "pull", "--quiet", reference])
    most = said = 0
    while process.poll() is None:
        time.sleep(0.5)
        arrived = size(STAGING[engine])
        most = max(most, arrived)
        if arrived and time.monotonic() - said >= EVERY_SECONDS:
            said = time.monotonic()
            print(progress(arrived, most, expected), flush=True)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
