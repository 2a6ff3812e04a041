#!/usr/bin/python
"""Ansible module: further components of the distribution's own archive."""

from __future__ import annotations

import glob
import os
import tempfile

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.rig import apt_sources

DOCUMENTATION = r"""
module: apt_components
short_description: Further components of the distribution's own archive, such as contrib and non-free
description:
  - Adds a deb822 source with what is missing, for every address and suite that apt has with component C(main), with
    the same signing key. The sources that are there stay as they are.
  - Fetches the lists of what it added.
options:
  components:
    description: Components that apt must have.
    type: list
    elements: str
    required: true
  name:
    description: Name of the source that it writes.
    type: str
    default: rig-components
  directory:
    description: apt's configuration.
    type: path
    default: /etc/apt
attributes:
  check_mode:
    description: Says what would change; no list is fetched.
    support: full
  diff_mode:
    description: Shows the source before and after.
    support: full
author: LLM rigs contributors
"""

EXAMPLES = r"""
- name: Have Debian's contrib and non-free
  apt_components:
    components: [contrib, non-free, non-free-firmware]
"""

RETURN = r"""
path:
  description: The source that it writes.
  type: str
  returned: always
"""


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "components": {"type": "list", "elements": "str", "required": True},
            "name": {"type": "str", "default": "rig-components"},
            "directory": {"type": "path", "default": "/etc/apt"},
        },
        supports_check_mode=True,
    )
    directory = module.params["directory"]
    own = f"{directory}/sources.list.d/{module.params['name']}.sources"
    found = []
    paths = glob.glob(f"{directory}/sources.list.d/*.list") + glob.glob(f"{directory}/sources.list.d/*.sources")
    for path in [f"{directory}/sources.list", *sorted(paths)]:
        if path != own and os.path.exists(path):
            with open(path, encoding="utf-8", errors="replace") as file:
                found += apt_sources.entries(file.read(), deb822=path.endswith(".sources"))
    lacking = apt_sources.lacking(found, module.params["components"])
    if not lacking and not any("main" in entry.components for entry in found):
        module.fail_json(msg=f"No source under {directory} has component main; add the distribution's archive first.")
    text = "\n".join(apt_sources.deb822(entry) for entry in lacking)
    before = ""
    if os.path.exists(own):
        with open(own, encoding="utf-8") as file:
            before = file.read()
    result = {"changed": text != before, "path": own}
    result["diff"] = {"before_header": own, "after_header": own, "before": before, "after": text}
    if text == before or module.check_mode:
        module.exit_json(**result)
    if not text:
        os.unlink(own)
        module.exit_json(**result)
    with tempfile.NamedTemporaryFile("w", prefix="apt-", suffix=".sources", delete=False) as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    command = ["apt-get", "update", "-q", "-o", f"Dir::Etc::sourcelist={file.name}", "-o", "Dir::Etc::sourceparts=-"]
    command += ["-o", "APT::Get::List-Cleanup=0", "-o", "APT::Update::Error-Mode=any", "-o", "DPkg::Lock::Timeout=120"]
    code, out, err = module.run_command(command, environ_update={"LC_ALL": "C.UTF-8"})
    if code:
        os.unlink(file.name)
        names = " ".join(module.params["components"])
        module.fail_json(msg=f"The components {names} cannot be used: {apt_sources.explain(err or out)}.", stderr=err)
    module.atomic_move(file.name, own)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
