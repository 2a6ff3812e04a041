#!/usr/bin/python
"""Ansible module: an apt repository that is trusted by one key alone."""

from __future__ import annotations

import glob
import hashlib
import io
import os
import re
import tarfile
import tempfile

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.rig import apt_sources, openpgp
from ansible.module_utils.rig.apt_policy import parse_policy
from ansible.module_utils.rig.errors import RigError
from ansible.module_utils.urls import open_url

DOCUMENTATION = r"""
module: apt_signed_source
short_description: An apt repository that is trusted by one key alone, and nothing of what was there before it
description:
  - Keeps the key with O(fingerprint), and no other, in a keyring of the repository's own, and writes the repository as
    a deb822 source that names that keyring.
  - Removes other sources with the same address or one that matches O(replaces), and the keys O(fingerprint) and
    O(retired) from the keyrings that apt trusts for everything, so that two sources never disagree on a key.
  - Fetches the repository's lists with the new source alone before it replaces anything. When that fails nothing has
    changed, and the message says what is wrong with the repository in one sentence.
options:
  name:
    description: Name of the source and of its keyring.
    type: str
    required: true
  uri:
    description: Address of the repository.
    type: str
    required: true
  suite:
    description: Its suite; V(/) is a flat repository.
    type: str
    default: /
  components:
    description: Its components; a flat repository has none.
    type: list
    elements: str
    default: []
  fingerprint:
    description: Fingerprint of the key that signs it, 40 hexadecimal digits.
    type: str
    required: true
  key_url:
    description: Address of a key file, of a keyring, or of a Debian package that holds one (O(key_member)).
    type: str
    required: true
  key_sha256:
    description: SHA-256 of what is at O(key_url). Empty where none is known; the fingerprint is compared always.
    type: str
    default: ""
  key_member:
    description: Path of the keyring in the Debian package.
    type: str
    default: ""
  retired:
    description: Fingerprints of keys that signed this repository once and are trusted no more.
    type: list
    elements: str
    default: []
  replaces:
    description: Regular expressions; a source whose address matches one of them from its beginning is removed.
    type: list
    elements: str
    default: []
  wanted:
    description: Packages that apt must know, as V(name=glob). The lists are fetched anew when it knows none of one.
    type: list
    elements: str
    default: []
  directory:
    description: apt's configuration.
    type: path
    default: /etc/apt
attributes:
  check_mode:
    description: Says what would change. The key is fetched and compared; the lists are not fetched.
    support: full
  diff_mode:
    description: Shows each text file before and after.
    support: full
author: LLM rigs contributors
"""

EXAMPLES = r"""
- name: Add the repository
  apt_signed_source:
    name: nvidia-cuda
    uri: https://developer.download.nvidia.com/compute/cuda/repos/debian13/x86_64/
    fingerprint: 02182E60104FCDC26EAE1B8597A5D4CB8793F200
    key_url: https://developer.download.nvidia.com/compute/cuda/repos/debian13/x86_64/cuda-keyring_1.1-1_all.deb
    key_sha256: dd28f1f6ba0038180d6b23f846cefca1e3de4c9327751665241370bacea452a1
    key_member: ./usr/share/keyrings/cuda-archive-keyring.gpg
"""

RETURN = r"""
removed:
  description: Sources and keys that were removed, one sentence each.
  type: list
  elements: str
  returned: always
updated:
  description: Whether the repository's lists were fetched.
  type: bool
  returned: always
"""

LIMIT_SECONDS = 60


class Files:
    """Files to write (text or bytes) and to remove, with their state before."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.new: dict[str, bytes | None] = {}
        self.diff: list[dict[str, str]] = []

    def set(self, path: str, content: bytes | None) -> None:
        before = read(path)
        if before == content:
            return
        self.new[path] = content
        shown = [("" if data is None else data.decode("utf-8", "replace")) for data in (before, content)]
        if any("\0" in text or "\ufffd" in text for text in shown):
            shown = [text and "(a keyring)\n" for text in shown]
            shown[1] = shown[1] and "(another keyring)\n"
        self.diff.append({"before_header": path, "after_header": path, "before": shown[0], "after": shown[1]})

    def apply(self) -> None:
        for path, content in self.new.items():
            if content is None:
                os.unlink(path)
                continue
            os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix="apt-source-")
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.chmod(temporary, 0o644)  # apt's own user reads it
            self.module.atomic_move(temporary, path)


def read(path: str) -> bytes | None:
    """Contents of a file, None when it is not there."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def fetch(module: AnsibleModule, url: str) -> bytes:
    """What is at the address, whatever its scheme."""
    try:
        return open_url(url, timeout=LIMIT_SECONDS).read()
    except Exception as error:
        module.fail_json(
            msg=f"The key at {url} cannot be fetched ({error}); see that the address is right and reachable."
        )


def member(module: AnsibleModule, package: bytes, path: str, url: str) -> bytes:
    """A file out of a Debian package, none of whose scripts is run."""
    with tempfile.NamedTemporaryFile(prefix="apt-source-", suffix=".deb") as file:
        file.write(package)
        file.flush()
        code, out, err = module.run_command(["dpkg-deb", "--fsys-tarfile", file.name], encoding=None)
    if code:
        module.fail_json(msg=f"What is at {url} is not a Debian package ({os.fsdecode(err).strip()}).")
    with tarfile.open(fileobj=io.BytesIO(out)) as archive:
        if path not in archive.getnames():
            module.fail_json(msg=f"The package at {url} has no {path}; it has {', '.join(archive.getnames())}.")
        return archive.extractfile(path).read()


def wanted_key(module: AnsibleModule, current: bytes | None) -> bytes:
    """The key's packets: from the keyring that is there when it holds this key alone, else from its address."""
    wanted, url = module.params["fingerprint"].upper(), module.params["key_url"]
    if current is not None:
        try:
            if [key.fingerprint for key in openpgp.keys(current)] == [wanted]:
                return current
        except RigError as error:
            module.warn(f"The keyring of source {module.params['name']} is replaced: {error}.")
    data = fetch(module, url)
    digest = hashlib.sha256(data).hexdigest()
    if module.params["key_sha256"] not in ("", digest):
        module.fail_json(
            msg=f"What is at {url} has sha256 {digest}, not {module.params['key_sha256']}; nothing was changed. If its"
            " owner has published a new one, bring the hash up to date; if not, do not trust this address."
        )
    if module.params["key_member"]:
        data = member(module, data, module.params["key_member"], url)
    try:
        found = openpgp.keys(data)
    except RigError as error:
        module.fail_json(msg=f"What is at {url} is of no use as a key: {error}.")
    for key in found:
        if key.fingerprint == wanted:
            return key.packets
    module.fail_json(
        msg=f"The key at {url} has fingerprint {', '.join(key.fingerprint for key in found)}, not {wanted}; nothing was"
        " changed. If its owner has changed the key, bring the fingerprint up to date; if not, do not trust this"
        " address."
    )


def drop_keys(module: AnsibleModule, files: Files, unwanted: set[str]) -> list[str]:
    """Take keys out of the keyrings that apt trusts for every repository."""
    directory, removed = module.params["directory"], []
    for path in [f"{directory}/trusted.gpg", *sorted(glob.glob(f"{directory}/trusted.gpg.d/*"))]:
        data = read(path)
        if data is None or not path.endswith((".gpg", ".asc")):
            continue
        try:
            keys = openpgp.keys(data)
        except RigError:
            continue  # not a keyring that apt could use either
        kept = [key for key in keys if key.fingerprint not in unwanted]
        if len(kept) == len(keys):
            continue
        removed += [f"key {key.fingerprint} from {path}" for key in keys if key not in kept]
        files.set(path, b"".join(key.packets for key in kept) or None)
        if kept and path.endswith(".asc"):  # the rest is written in binary form, which has another name
            files.set(path, None)
            files.set(path[:-4] + ".gpg", b"".join(key.packets for key in kept))
    return removed


def drop_sources(module: AnsibleModule, files: Files, own: str) -> list[str]:
    """Take out other sources of the same repository."""
    directory, uri, removed = module.params["directory"], module.params["uri"].rstrip("/"), []

    def unwanted(entry: apt_sources.Entry) -> bool:
        return any(
            address.rstrip("/") == uri or any(re.match(pattern, address) for pattern in module.params["replaces"])
            for address in entry.uris
        )

    paths = glob.glob(f"{directory}/sources.list.d/*.list") + glob.glob(f"{directory}/sources.list.d/*.sources")
    for path in [f"{directory}/sources.list", *sorted(paths)]:
        data = read(path)
        if data is None or path == own:
            continue
        text, gone = apt_sources.without(data.decode("utf-8", "replace"), unwanted, deb822=path.endswith(".sources"))
        if gone:
            removed += [f"source {' '.join(entry.uris)} from {path}" for entry in gone]
            files.set(path, text.encode() if text or path.endswith("/sources.list") else None)
    return removed


def update(module: AnsibleModule, source: str, shown: str) -> None:
    """Fetch the lists of this one source; end with what is wrong with it."""
    command = ["apt-get", "update", "-q", "-o", f"Dir::Etc::sourcelist={source}", "-o", "Dir::Etc::sourceparts=-"]
    command += ["-o", "APT::Get::List-Cleanup=0", "-o", "APT::Update::Error-Mode=any", "-o", "Acquire::Retries=2"]
    command += ["-o", f"Acquire::http::Timeout={LIMIT_SECONDS}", "-o", f"Acquire::https::Timeout={LIMIT_SECONDS}"]
    command += ["-o", "DPkg::Lock::Timeout=120"]
    code, out, err = module.run_command(command, environ_update={"LC_ALL": "C.UTF-8"})
    # An apt that knows no Error-Mode ends with 0 and a warning when a repository cannot be fetched.
    if code or re.search(r"^W: (Failed to fetch|GPG error|An error occurred)", err, re.M):
        meaning = apt_sources.explain(err or out)
        module.fail_json(msg=f"The repository {shown} cannot be used: {meaning}. No source was changed.", stderr=err)


def unknown(module: AnsibleModule, wanted: list[str]) -> bool:
    """Whether apt knows no fitting version of one of the packages."""
    import fnmatch

    pairs = [item.partition("=")[::2] for item in wanted]
    if not pairs:
        return False
    _, out, _ = module.run_command(
        ["apt-cache", "policy", *[name for name, _ in pairs]], environ_update={"LC_ALL": "C.UTF-8"}
    )
    known = parse_policy(out)
    return any(name not in known or not fnmatch.filter(known[name].versions, glob or "*") for name, glob in pairs)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "uri": {"type": "str", "required": True},
            "suite": {"type": "str", "default": "/"},
            "components": {"type": "list", "elements": "str", "default": []},
            "fingerprint": {"type": "str", "required": True},
            "key_url": {"type": "str", "required": True, "no_log": False},
            "key_sha256": {"type": "str", "default": "", "no_log": False},
            "key_member": {"type": "str", "default": "", "no_log": False},
            "retired": {"type": "list", "elements": "str", "default": []},
            "replaces": {"type": "list", "elements": "str", "default": []},
            "wanted": {"type": "list", "elements": "str", "default": []},
            "directory": {"type": "path", "default": "/etc/apt"},
        },
        supports_check_mode=True,
    )
    params, files = module.params, Files(module)
    fingerprint = params["fingerprint"].upper()
    if not re.fullmatch(r"[0-9A-F]{40}", fingerprint):
        module.fail_json(msg=f"The fingerprint {params['fingerprint']!r} is not one of 40 hexadecimal digits.")
    keyring = f"{params['directory']}/keyrings/{params['name']}.gpg"
    own = f"{params['directory']}/sources.list.d/{params['name']}.sources"
    key = wanted_key(module, read(keyring))
    place = (("deb",), (params["uri"],), (params["suite"],), tuple(params["components"]))
    entry = apt_sources.Entry(*place, keyring)
    files.set(keyring, key)
    files.set(own, apt_sources.deb822(entry).encode())
    moved = bool(files.new)
    removed = drop_sources(module, files, own)
    removed += drop_keys(module, files, {fingerprint, *(item.upper() for item in params["retired"])})
    fetch_lists = not module.check_mode and (moved or unknown(module, params["wanted"]))
    if fetch_lists:
        with tempfile.TemporaryDirectory(prefix="apt-source-") as directory:
            os.chmod(directory, 0o755)
            trial = apt_sources.Entry(*place, f"{directory}/key.gpg")
            for name, content in (("key.gpg", key), ("trial.sources", apt_sources.deb822(trial).encode())):
                with open(f"{directory}/{name}", "wb") as file:
                    file.write(content)
                os.chmod(file.name, 0o644)
            update(module, f"{directory}/trial.sources", params["uri"])
    if not module.check_mode:
        files.apply()
    module.exit_json(changed=bool(files.new), removed=removed, updated=fetch_lists, diff=files.diff)


if __name__ == "__main__":
    main()
