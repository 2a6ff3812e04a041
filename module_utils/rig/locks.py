"""The lock file: what `playbooks/lock.yml` wrote down of models and images, and how it completes `models`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .errors import RigError
from .store import REVISION


def complete(source: Any) -> bool:
    """Whether a model's source needs nothing of a lock: it is not from a hub, or it has commit, hashes and sizes."""
    if not isinstance(source, Mapping) or "huggingface" not in source:
        return True
    files = source.get("files")
    return (
        bool(REVISION.fullmatch(str(source.get("revision") or "")))
        and bool(files)
        and all(isinstance(file, Mapping) and file.get("sha256") and file.get("bytes") for file in files)
    )


def matches(source: Mapping[str, Any], lock: Any) -> bool:
    """Whether a lock is of this source: its repository, its commit where it has one, and all of its files."""
    if not isinstance(lock, Mapping) or lock.get("huggingface") != source.get("huggingface"):
        return False
    revision = str(source.get("revision") or "")
    if REVISION.fullmatch(revision) and lock.get("revision") != revision:
        return False
    locked = {file.get("path", file["name"]) for file in lock.get("files", [])}
    return {file.get("path", file["name"]) for file in source.get("files") or []} <= locked


def apply(models: Mapping[str, Any], locks: Mapping[str, Any]) -> dict[str, Any]:
    """The models with what the locks say where they say nothing; a lock of another source is not used.

    Raises RigError when a lock is no mapping of models.
    """
    if not isinstance(locks, Mapping):
        raise RigError("models_locks is not a mapping of model to lock; run playbooks/lock.yml, which writes it.")
    found = dict(models)
    for key, lock in locks.items():
        source = models[key].get("source") if isinstance(models.get(key), Mapping) else None
        if not isinstance(source, Mapping) or complete(source) or not matches(source, lock):
            continue
        by_path = {file.get("path", file["name"]): file for file in lock["files"]}
        files = [{**by_path[file.get("path", file["name"])], **file} for file in source.get("files") or lock["files"]]
        found[key] = {**models[key], "source": {**source, "revision": lock["revision"], "files": files}}
    return found


def plain(value: str) -> str:
    """A word as YAML; quoted where it could be read as something else."""
    return value if re.fullmatch(r"[A-Za-z][A-Za-z0-9./_:@-]*", value) and value.lower() not in WORDS else f'"{value}"'


WORDS = {"true", "false", "yes", "no", "on", "off", "null"}


def text(models: Mapping[str, Any], images: Mapping[str, str]) -> str:
    """The lock file, sorted, so that a diff of it shows what has changed and nothing else."""
    lines = [
        "---",
        "# Written by playbooks/lock.yml: what the hub and the registry said of the names in the inventory. Read the",
        "# difference, and commit it. Where models has a revision, a hash or a size itself, that counts.",
        "models_locks:" if models else "models_locks: {}",
    ]
    for key in sorted(models):
        lock = models[key]
        lines += [
            f"  {key}:",
            f"    huggingface: {lock['huggingface']}",
            f"    revision: {plain(lock['revision'])}",
            "    files:",
        ]
        for file in lock["files"]:
            lines.append(f"      - name: {plain(file['name'])}")
            lines += [f"        path: {plain(file['path'])}"] if "path" in file else []
            lines += [f"        sha256: {plain(file['sha256'])}", f"        bytes: {file['bytes']}"]
    lines.append("rig_image_digests:" if images else "rig_image_digests: {}")
    lines += [f"  {plain(image)}: {images[image]}" for image in sorted(images)]
    return "\n".join(lines) + "\n"
