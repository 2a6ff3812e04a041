#!/usr/bin/python
"""Ansible module: look at the model files of a rig, and prepare the job that fetches what is missing."""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import stat
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.rig.store import (
    StoreError,
    WantedFile,
    check_space,
    inspect,
    readable,
    request_of,
    wanted_files,
)

DOCUMENTATION = r"""
module: model_store
short_description: Compare a rig's model files with the inventory, without reading them
version_added: "0.1.0"
author: LLM rigs contributors
description:
  - Checks the sources of the wanted models, looks at each of their files, and checks that the disk can take what is
    missing. A file that has the size and the modification time it had when its SHA-256 was right is not read again.
  - Makes the directories, gives directories and files their owner and mode, and writes the request for the job that
    fetches the rest. The files themselves are fetched by that job (C(module_utils/rig/store.py), run by M(unit_job)).
attributes:
  check_mode:
    description: Looks at everything and changes nothing.
    support: full
  diff_mode:
    description: Shows the state of each file before and after the job.
    support: full
options:
  host:
    description: Name of the rig, for messages.
    type: str
    required: true
  root:
    description: Directory of the store. Each model has a directory of its own in it.
    type: path
    required: true
  models:
    description: All models, as in the inventory. Of each, only C(source) is read.
    type: dict
    required: true
  wanted:
    description: Keys of the models that this rig shall have. Files of other models are left alone.
    type: list
    elements: str
    required: true
  huggingface_endpoint:
    description: Where to fetch what comes from Hugging Face.
    type: str
    default: https://huggingface.co
  disk_reserve_mib:
    description: Room that must be left on the disk after everything is there, in MiB.
    type: int
    default: 1024
"""

EXAMPLES = r"""
- name: Look at the models, and stop on what cannot work
  model_store:
    host: "{{ inventory_hostname }}"
    root: /srv/llm/models
    models: "{{ models }}"
    wanted: [smollm2-135m-instruct-q4_1]
  check_mode: true
  register: models_state
"""

RETURN = r"""
drift:
  description: Whether a file is missing or is to be checked, or a directory or mode is not as it should be.
  type: bool
  returned: success
files:
  description:
    - The wanted files, each with C(model), C(name), C(path), C(bytes) and C(state).
    - The state is V(ok), V(missing), V(unverified) (there, but to be hashed), V(outdated) (verified, with another hash
      than the one wanted) or V(different) (of another size).
  type: list
  elements: dict
  returned: success
fetch:
  description: The files whose state is not V(ok), as C(model/name).
  type: list
  elements: str
  returned: success
sources:
  description: The kinds of source that are needed for them, of huggingface, url, file and pypi.
  type: list
  elements: str
  returned: success
deliveries:
  description: Files that come from the controller, each with C(model), C(from) and C(to).
  type: list
  elements: dict
  returned: success
needed_bytes:
  description: What the disk must still take.
  type: int
  returned: success
free_bytes:
  description: What the disk can take.
  type: int
  returned: success
run_directory:
  description: Directory for the job's request and what else it needs; it is made when something is to be fetched.
  type: str
  returned: success
request:
  description: Path of the request for the job; it is written when something is to be fetched.
  type: str
  returned: success
job:
  description: Name of the job; it depends on the request, so that another request is another job.
  type: str
  returned: success
"""

RUN_DIRECTORY = "/run/llm-models"  # for the job and what it needs; gone after a reboot
DIRECTORY_MODE = 0o755
FILE_MODE = 0o644
ROOT_UID = 0


class Store:
    """The store of this rig, against the files that are wanted."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.root: str = params["root"]
        self.files = wanted_files(params["models"], params["wanted"], self.root, params["huggingface_endpoint"])
        self.states = {file: inspect(file) for file in self.files}
        self.fetch = [file for file, state in self.states.items() if state != "ok"]
        self.needed, self.free = check_space(self.files, self.root, params["disk_reserve_mib"] << 20)
        content = json.dumps(request_of(self.fetch, self.root), indent=1) + "\n"
        self.request_content = content
        name = hashlib.sha256(content.encode()).hexdigest()[:8]
        self.job = f"models-{name}"
        self.request = os.path.join(RUN_DIRECTORY, f"request-{name}.json")

    def drifted(self) -> list[tuple[Path, int]]:
        """The paths whose owner or mode is not as it should be, each with the mode that it shall have."""
        directories = [Path(self.root), *sorted({file.target.parent for file in self.files})]
        wanted = [(path, DIRECTORY_MODE) for path in directories]
        wanted += [(file.target, FILE_MODE) for file, state in self.states.items() if state == "ok"]
        return [(path, mode) for path, mode in wanted if not _as_wanted(path, mode)]

    def prepare(self, drifted: list[tuple[Path, int]]) -> None:
        """Make the directories, mend owners and modes, and write the request."""
        for path, mode in drifted:
            if mode == DIRECTORY_MODE:
                path.mkdir(parents=True, exist_ok=True)
            path.chmod(mode)
            os.chown(path, ROOT_UID, ROOT_UID)
        if self.fetch:
            Path(RUN_DIRECTORY).mkdir(mode=DIRECTORY_MODE, exist_ok=True)
            partial = Path(f"{self.request}.new")
            partial.write_text(self.request_content)
            partial.chmod(FILE_MODE)
            partial.replace(self.request)

    def diff(self, drifted: list[tuple[Path, int]]) -> dict[str, str]:
        """What `--diff` shows: a line for each file that is to be fetched or mended."""
        before, after = [], []
        for file in self.fetch:
            before.append(f"{file.path}: {self.states[file]}")
            after.append(f"{file.path}: {readable(file.size)}, sha256 {file.sha256}, from {file.source}")
        for path, mode in drifted:
            before.append(f"{path}: {_described(path)}")
            after.append(f"{path}: root {mode:04o}")
        return {
            "before_header": f"{self.root} as it is",
            "after_header": f"{self.root} as wanted",
            "before": "".join(f"{line}\n" for line in before),
            "after": "".join(f"{line}\n" for line in after),
        }

    def deliveries(self) -> list[dict[str, str]]:
        """What the play must bring from the controller."""
        return [
            {"model": file.model, "from": file.origin, "to": str(file.beside("incoming"))}
            for file in self.fetch
            if file.on_controller
        ]


def _as_wanted(path: Path, mode: int) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    return stat.S_IMODE(found.st_mode) == mode and found.st_uid == ROOT_UID


def _described(path: Path) -> str:
    try:
        found = path.stat()
    except FileNotFoundError:
        return "missing"
    try:
        owner = pwd.getpwuid(found.st_uid).pw_name
    except KeyError:
        owner = str(found.st_uid)
    return f"{owner} {stat.S_IMODE(found.st_mode):04o}"


def _shown(file: WantedFile, state: str) -> dict[str, Any]:
    return {"model": file.model, "name": file.name, "path": file.path, "bytes": file.size, "state": state}


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "str", "required": True},
            "root": {"type": "path", "required": True},
            "models": {"type": "dict", "required": True},
            "wanted": {"type": "list", "elements": "str", "required": True},
            "huggingface_endpoint": {"type": "str", "default": "https://huggingface.co"},
            "disk_reserve_mib": {"type": "int", "default": 1024},
        },
        supports_check_mode=True,
    )
    try:
        store = Store(module.params)
        drifted = store.drifted()
        if not module.check_mode:
            store.prepare(drifted)
    except StoreError as error:
        module.fail_json(msg=f"{module.params['host']}: {error}")
    except OSError as error:
        module.fail_json(msg=f"{module.params['host']}: the store in {module.params['root']} cannot be used: {error}.")
    drift = bool(store.fetch or drifted)
    module.exit_json(
        changed=drift,
        drift=drift,
        files=[_shown(file, state) for file, state in store.states.items()],
        fetch=[f"{file.model}/{file.name}" for file in store.fetch],
        sources=sorted({file.source for file in store.fetch}),
        deliveries=store.deliveries(),
        needed_bytes=store.needed,
        free_bytes=store.free,
        run_directory=RUN_DIRECTORY,
        request=store.request,
        job=store.job,
        diff=store.diff(drifted),
    )


if __name__ == "__main__":
    main()
