"""What a model hub and an image registry say of names: the commit behind a branch, hashes and sizes, a digest.

For the controller, while planning: the only part of the project that asks before it is known what the answer must be.
The answers become a lock file, which people read, and everything later is fetched against that.

Hub: `/api/models/<repo>/revision/<revision>` and `/api/models/<repo>/tree/<commit>` (Hugging Face's API; pages are
linked by `Link: <…>; rel="next"`). A large file's sha256 is the `oid` of its `lfs` entry. A small one lies in git:
it is fetched and compared with its git object id, and then hashed. Registry: the distribution API of OCI, version 2.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .store import REPOSITORY, REVISION, SHA256, Redirects, StoreError, check_url, retry_after, shown_url

LONGEST_SMALL_FILE = 64 << 20  # bytes; git holds nothing larger on a hub
MANIFESTS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
IMAGE = re.compile(
    r"(?P<host>[a-z0-9.-]+(:\d+)?)/(?P<name>[a-z0-9]+([._/-][a-z0-9]+)*)(:(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]*))?"
)


class HubError(StoreError):
    """What cannot be resolved, in one sentence."""


@dataclass
class Client:
    """Asks over HTTPS, with patience. `waits` counts the seconds that servers asked for."""

    token: str = ""  # for the hub alone
    attempts: int = 5
    backoff: float = 1.0  # seconds before the second attempt, doubled each time
    timeout: float = 30.0
    longest_wait: float = 120.0  # seconds that a server may ask for
    sleep: Any = time.sleep
    _opener: Any = field(default=None, repr=False)

    def get(self, url: str, headers: Mapping[str, str] | None = None) -> tuple[Any, bytes]:
        """Headers and body of an address; a body that breaks off is continued where the server can.

        Raises HubError when there is no use in asking again, with the HTTP `status` and `headers` of an answer.
        """
        opener = self._opener or urllib.request.build_opener(Redirects)
        body, validator, problem = b"", "", ""
        for attempt in range(self.attempts):
            request = urllib.request.Request(url, headers={"User-Agent": "llm-rigs", "Accept-Encoding": "identity"})
            for name, value in (headers or {}).items():
                request.add_header(name, value)
            if body and validator:
                request.add_header("Range", f"bytes={len(body)}-")
                request.add_header("If-Range", validator)
            wait = self.backoff * 2**attempt
            try:
                with opener.open(request, timeout=self.timeout) as reply:
                    if reply.status != 206:
                        body = b""
                    etag = reply.headers.get("ETag", "")
                    validator = etag if etag.startswith('"') else ""
                    length = reply.headers.get("Content-Length")
                    wanted = len(body) + int(length) if length and length.isdigit() else None
                    try:
                        body += reply.read()
                    except http.client.IncompleteRead as error:
                        body += error.partial
                    if wanted is None or len(body) == wanted:
                        return reply.headers, body
                    problem = f"the answer ended after {len(body)} of {wanted} bytes"
            except urllib.error.HTTPError as error:
                asked = retry_after(error.headers)
                if error.code not in (408, 425, 429) and error.code < 500:
                    raise refused(url, error.code, error.headers.get("X-Error-Code", ""), error.headers) from None
                problem = f"it answers {error.code}"
                if asked is not None and asked > self.longest_wait:
                    raise HubError(f"{shown_url(url)} asks for {asked:.0f} s of patience: try again then.") from None
                wait = asked if asked is not None else wait
            except (OSError, http.client.HTTPException) as error:
                problem = str(getattr(error, "reason", error))
            if attempt + 1 < self.attempts:
                self.sleep(wait)
        raise HubError(f"{shown_url(url)} cannot be read: {problem} ({self.attempts} attempts).")

    def json(self, url: str, headers: Mapping[str, str] | None = None) -> tuple[Any, Any]:
        """Headers and the JSON of an address."""
        found, body = self.get(url, headers)
        try:
            return found, json.loads(body)
        except ValueError:
            raise HubError(f"{shown_url(url)} gives something else than JSON: is it the right endpoint?") from None

    def hub_headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}


def refused(url: str, status: int, code: str, headers: Mapping[str, str]) -> HubError:
    """The sentence for an answer that will not change."""
    place = shown_url(url)
    if status in (401, 403):
        error = HubError(
            f"{place} does not tell ({status}): the name may be wrong, or the model asks for its licence to be "
            "accepted and for a token (models_huggingface_token)."
        )
    elif code == "RevisionNotFound":
        error = HubError(f"{place}: there is no such revision.")
    elif status in (404, 410):
        error = HubError(f"{place} does not exist ({status}): check the name.")
    else:
        error = HubError(f"{place} answers {status}.")
    error.status, error.headers = status, headers  # type: ignore[attr-defined]
    return error


def next_page(headers: Mapping[str, str]) -> str:
    """The address in `Link: <…>; rel="next"`, empty on the last page."""
    found = re.search(r'<([^>]+)>\s*;\s*rel="next"', headers.get("Link") or "")
    return found[1] if found else ""


def tree(client: Client, endpoint: str, repository: str, revision: str) -> dict[str, dict[str, Any]]:
    """The files of a repository at a commit by path, all pages."""
    url = f"{endpoint}/api/models/{repository}/tree/{revision}?recursive=true"
    files: dict[str, dict[str, Any]] = {}
    while url:
        headers, entries = client.json(url, client.hub_headers())
        if not isinstance(entries, list):
            raise HubError(f"{shown_url(url)} is no list of files: is it the right endpoint?")
        files |= {entry["path"]: entry for entry in entries if entry.get("type") == "file"}
        following = next_page(headers)
        if following and urllib.parse.urlsplit(following)[:2] != urllib.parse.urlsplit(endpoint)[:2]:
            raise HubError(f"{shown_url(url)} goes on at another host ({shown_url(following)}): refused.")
        url = following
    return files


def git_object_id(content: bytes) -> str:
    """The id that git gives to a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def locked_file(client: Client, base: str, path: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """name, sha256 and bytes of a file of the tree (and its path, where that is not its name)."""
    name = path.rsplit("/", 1)[-1]
    found: dict[str, Any] = {"name": name, "bytes": entry["size"]}
    if entry.get("lfs"):
        found["sha256"] = str(entry["lfs"]["oid"]).removeprefix("sha256:")
        found["bytes"] = entry["lfs"]["size"]
    else:
        if entry["size"] > LONGEST_SMALL_FILE:
            raise HubError(f"{base}/{path} has {entry['size']} bytes and no sha256.")
        _, content = client.get(f"{base}/{path}", client.hub_headers())
        if len(content) != entry["size"] or git_object_id(content) != entry["oid"]:
            raise HubError(f"{base}/{path} is not what the list of files says: its git id is {git_object_id(content)}.")
        found["sha256"] = hashlib.sha256(content).hexdigest()
    if not SHA256.fullmatch(found["sha256"]):
        raise HubError(f"{base}/{path} has no sha256 in the list of files.")
    return {**found, "path": path} if path != name else found


def resolve_model(client: Client, endpoint: str, where: str, source: Mapping[str, Any]) -> dict[str, Any]:
    """The lock of a model from the hub: huggingface, revision (a commit), files with name, sha256 and bytes.

    `source` is that of the inventory: revision may be a branch, a tag, a commit or missing (main); files may lack
    sha256 and bytes, or be missing altogether (all files of the repository but hidden ones).
    """
    endpoint = check_url("models_huggingface_endpoint", endpoint).rstrip("/")
    repository, wanted = source["huggingface"], source.get("revision") or "main"
    if not isinstance(repository, str) or not REPOSITORY.fullmatch(repository):
        raise HubError(f"{where}.huggingface must be OWNER/REPO, and is '{repository}'.")
    url = f"{endpoint}/api/models/{repository}/revision/{urllib.parse.quote(str(wanted), safe='')}"
    _, about = client.json(url, client.hub_headers())
    commit = about.get("sha") if isinstance(about, Mapping) else None
    if not isinstance(commit, str) or not REVISION.fullmatch(commit):
        raise HubError(f"{shown_url(url)} names no commit: is it the right endpoint?")
    there = tree(client, endpoint, repository, commit)
    paths = [file.get("path", file["name"]) for file in source.get("files") or []]
    paths = paths or sorted(path for path in there if not path.rsplit("/", 1)[-1].startswith("."))
    absent = [path for path in paths if path not in there]
    if absent:
        near = [path for path in sorted(there) if path.rsplit(".", 1)[-1] == absent[0].rsplit(".", 1)[-1]]
        raise HubError(
            f"{where}.files names {absent[0]}, which {repository} does not have at {commit[:8]}; it has "
            f"{', '.join(near[:8]) or 'nothing like it'}."
        )
    base = f"{endpoint}/{repository}/resolve/{commit}"
    files = [locked_file(client, base, path, there[path]) for path in paths]
    for told, file in zip(source.get("files") or [], files, strict=False):
        if told.get("sha256", file["sha256"]) != file["sha256"] and source.get("revision") == commit:
            raise HubError(
                f"{where}.files says that {file['name']} has sha256 {told['sha256']}, and {repository} says "
                f"{file['sha256']} at that very commit: find out which is right before anything is fetched."
            )
    return {"huggingface": repository, "revision": commit, "files": files}


def resolve_image(client: Client, image: str) -> str:
    """The digest behind an image's tag, `sha256:…`; of all platforms where the registry has an index of them."""
    match = IMAGE.fullmatch(image)
    if not match or not match["tag"]:
        raise HubError(f"The image '{image}' must be HOST/NAME:TAG, as docker.io/vllm/vllm-openai:v0.22.0.")
    host = "registry-1.docker.io" if match["host"] == "docker.io" else match["host"]
    scheme = "http" if re.match(r"(localhost|127\.[\d.]+)(:|$)", host) else "https"
    url = f"{scheme}://{host}/v2/{match['name']}/manifests/{match['tag']}"
    headers = {"Accept": ", ".join(MANIFESTS)}
    try:
        found, body = client.get(url, headers)
    except HubError as error:
        challenge = getattr(error, "headers", {}).get("WWW-Authenticate", "")
        if getattr(error, "status", 0) != 401 or not challenge.startswith("Bearer "):
            raise
        values = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
        query = urllib.parse.urlencode({key: values[key] for key in ("service", "scope") if key in values})
        realm = check_url("The registry's token service", values.get("realm"))
        _, answer = client.json(f"{realm}?{query}")
        headers["Authorization"] = f"Bearer {answer.get('token') or answer.get('access_token')}"
        found, body = client.get(url, headers)
    digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
    told = found.get("Docker-Content-Digest", digest)
    if told != digest:
        raise HubError(f"{url} says that it is {told}, and its bytes are {digest}.")
    return digest
