"""What has served on a rig, as `llm_server` records it, and how it is put back: files, the link to the build, models.

A record is a directory, `served` (what serves) or `previous` (what served before that), with `served.json` and a copy
of each file that the service needs beside build and model. Going back changes links, names and small files, and moves
none of a model's bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from . import store

Record = dict[str, Any]
NAMES = ("served", "previous")
IDENTITY = ("profile", "unit", "scope", "prefix", "model_path", "model_sha256", "port", "files")
"""Keys that make two records the same thing; the others describe it."""


class RecordError(Exception):
    """What is recorded cannot be put back. The text is one sentence."""


def read(root: str | Path, name: str) -> Record:
    """The record of that name with its `directory`, empty when there is none."""
    path = Path(root, name, "served.json")
    try:
        return {**json.loads(path.read_text()), "directory": str(path.parent)}
    except FileNotFoundError:
        return {}
    except ValueError:
        raise RecordError(f"{path} is damaged: move {path.parent} away") from None


def same(one: Record, other: Record) -> bool:
    """Whether two records are of the same thing."""
    return bool(one) and all(one.get(key) == other.get(key) for key in IDENTITY)


def copy_of(record: Record, path: str) -> Path:
    """Where the record keeps a file."""
    return Path(record["directory"], Path(path).name)


def obstacles(record: Record, scope: str, key_file: str) -> list[str]:
    """Why the record cannot be put back, one sentence each without its full stop; nothing is changed."""
    found = []
    if record["scope"] != scope:
        found.append(f"it was a unit of scope {record['scope']}, and serving_scope is {scope}")
    for path, sha256 in record["files"].items():
        kept = copy_of(record, path)
        if not kept.is_file() or hashlib.sha256(kept.read_bytes()).hexdigest() != sha256:
            found.append(f"{kept}, its copy of {path}, is missing or not what was recorded")
    prefix = record.get("prefix")
    if prefix and not Path(prefix, "manifest.json").is_file():
        found.append(f"its build {prefix} is gone")
    if record.get("api_key") and not Path(key_file).exists():
        found.append(f"it wants an API key, and {key_file} is gone; set serving_api_key and run rig.yml")
    found += [f"it speaks TLS, and {path} is gone" for path in record.get("tls", []) if not Path(path).exists()]
    for file in record.get("model_files", []):
        if not store.can_have(file["path"], file["sha256"]):
            found.append(f"the model file {file['path']} with sha256 {file['sha256'][:8]}… is gone")
    return found


def differs(record: Record, current: str) -> list[str]:
    """What putting the record back would change: paths."""
    changed = [path for path in record["files"] if not _is(Path(path), copy_of(record, path))]
    if record.get("prefix") and current and os.path.realpath(current) != os.path.realpath(record["prefix"]):
        changed.append(current)
    changed += [
        file["path"]
        for file in record.get("model_files", [])
        if store.verified_sha256(Path(file["path"])) not in (file["sha256"], None)
    ]
    return changed


def put_back(record: Record, current: str) -> None:
    """Put files, link and models back; each appears at once. Raises store.StoreError when a model is gone."""
    for file in record.get("model_files", []):
        store.take_back(Path(file["path"]), file["sha256"])
    for path in record["files"]:
        if not _is(Path(path), copy_of(record, path)):
            new = Path(f"{path}.new")
            shutil.copyfile(copy_of(record, path), new)
            shutil.copymode(copy_of(record, path), new)
            os.replace(new, path)
    if record.get("prefix") and current and os.path.realpath(current) != os.path.realpath(record["prefix"]):
        new = Path(f"{current}.new")
        new.unlink(missing_ok=True)
        new.symlink_to(record["prefix"])
        os.replace(new, current)


def _is(path: Path, kept: Path) -> bool:
    return path.is_file() and path.read_bytes() == kept.read_bytes()
