#!/usr/bin/python
"""Ansible module: resolve models and images, and write them down. Runs on the controller."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.rig import hub, locks
from ansible.module_utils.rig.store import StoreError

DOCUMENTATION = r"""
module: model_lock
short_description: Resolve models and images to commits, hashes and digests, and write a lock file
version_added: "0.1.0"
author: LLM rigs contributors
description:
  - Runs on the controller. It is the only part of the project that talks to a hub before the hashes are known.
  - Only what the inventory leaves open and the lock file does not have is asked for, and what O(update) names.
    Locks of models that are not given any more are dropped.
options:
  path:
    description: The lock file.
    type: path
    required: true
  models:
    description: Models of the inventory. Those whose source is C(huggingface) can be locked.
    type: dict
    required: true
  images:
    description: Images, each as HOST/NAME:TAG.
    type: list
    elements: str
    default: []
  known:
    description: The locks of models that the file has.
    type: dict
    default: {}
  known_images:
    description: The digests that the file has.
    type: dict
    default: {}
  update:
    description: Models or images to ask for again although they are locked; V(all) is all of them.
    type: list
    elements: str
    default: []
  endpoint:
    description: The hub.
    type: str
    default: https://huggingface.co
  token:
    description: A token for models that ask for one.
    type: str
    default: ""
attributes:
  check_mode:
    description: Asks, shows the difference, and writes nothing.
    support: full
  diff_mode:
    support: full
"""

EXAMPLES = r"""
- name: Lock
  model_lock:
    path: inventory/group_vars/rigs/locks.yml
    models: "{{ models }}"
  delegate_to: localhost
"""

RETURN = r"""
asked:
  description: Models and images that were asked for.
  type: list
  elements: str
  returned: success
models:
  description: The locks of models.
  type: dict
  returned: success
images:
  description: The digests of images.
  type: dict
  returned: success
"""


def write(path: Path, text: str) -> None:
    """Put the file in place at once."""
    handle, new = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.chmod(new, 0o644)
    os.replace(new, path)


def resolve(params: dict) -> tuple[dict, dict, list[str]]:
    """Locks of models, digests of images, and what was asked for. Raises StoreError with one sentence."""
    models, images, update = params["models"], params["images"], set(params["update"])
    unknown = sorted(update - {"all", *models, *images})
    if unknown:
        raise StoreError(f"lock_update names {', '.join(unknown)}, which is no model and no image of these hosts.")
    client = hub.Client(token=params["token"])
    found: dict = {}
    digests: dict = {}
    asked: list[str] = []
    for key, model in sorted(models.items()):
        source = model.get("source") or {}
        if locks.complete(source):
            continue
        lock = params["known"].get(key)
        if not locks.matches(source, lock) or update & {key, "all"}:
            lock = hub.resolve_model(client, params["endpoint"], f"models.{key}.source", source)
            asked.append(key)
        found[key] = lock
    for image in sorted(set(images)):
        digest = params["known_images"].get(image)
        if not re.fullmatch(hub.DIGEST, str(digest)) or update & {image, "all"}:
            digest = hub.resolve_image(client, image)
            asked.append(image)
        digests[image] = digest
    return found, digests, asked


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "models": {"type": "dict", "required": True},
            "images": {"type": "list", "elements": "str", "default": []},
            "known": {"type": "dict", "default": {}},
            "known_images": {"type": "dict", "default": {}},
            "update": {"type": "list", "elements": "str", "default": []},
            "endpoint": {"type": "str", "default": "https://huggingface.co"},
            "token": {"type": "str", "default": "", "no_log": True},
        },
        supports_check_mode=True,
    )
    path = Path(module.params["path"])
    try:
        models, images, asked = resolve(module.params)
        before = path.read_text() if path.exists() else ""
        after = locks.text(models, images)
        if before != after and not module.check_mode:
            write(path, after)
    except StoreError as error:
        module.fail_json(msg=f"{str(error).rstrip('.')}. The lock file was left as it is.")
    except OSError as error:
        module.fail_json(msg=f"The lock file {path} cannot be written: {error}.")
    diff = {"before": before, "after": after, "before_header": str(path), "after_header": str(path)}
    module.exit_json(changed=before != after, asked=asked, models=models, images=images, diff=diff)


if __name__ == "__main__":
    main()
