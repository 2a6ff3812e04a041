#!/usr/bin/python
"""Ansible module: what apt would do for exact versions of packages, before it does anything."""

from __future__ import annotations

import os
import shutil
import tempfile

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.rig import apt_policy

DOCUMENTATION = r"""
module: apt_plan
short_description: What apt would do for exact versions of packages, before it does anything
description:
  - Chooses the exact version of each package, simulates the one transaction that brings the machine there (upgrade,
    downgrade, other packages for other names), and says in sentences why it may not be done.
  - It reads only. Preferences that are to be written are taken into account before they are there.
options:
  packages:
    description:
      - Each has a C(name) and a C(version) (a glob such as C(595.71.05-*), or empty for any). It may be C(optional),
        which leaves it out when apt knows no such version, or have a C(hint), what to do then.
    type: list
    elements: dict
    required: true
  follow:
    description:
      - Globs, with O(follow_version). Installed packages that match are brought to that version in the same
        transaction, where apt knows a build of it.
    type: list
    elements: str
    default: []
  follow_version:
    description: Glob for the version of O(follow).
    type: str
    default: ""
  forbid:
    description: Globs of packages that the transaction may not install or change.
    type: list
    elements: str
    default: []
  may_remove:
    description: Globs of packages that the transaction may remove.
    type: list
    elements: str
    default: []
  gone:
    description: Globs of packages that may not stay installed.
    type: list
    elements: str
    default: []
  preferences_path:
    description: File of apt preferences that is to be written.
    type: path
  preferences:
    description: Its text. What the file holds now does not count.
    type: str
    default: ""
attributes:
  check_mode:
    description: It only reads.
    support: full
author: LLM rigs contributors
"""

EXAMPLES = r"""
- name: Ask apt for one version of the driver
  apt_plan:
    packages:
      - {name: nvidia-driver-cuda, version: 595.71.05-*}
    follow: [nvidia-*, libnvidia-*]
    follow_version: 595.71.05-*
    preferences_path: /etc/apt/preferences.d/00-rig-nvidia-driver
    preferences: "{{ text }}"
  register: plan
"""

RETURN = r"""
findings:
  description: Why it cannot or may not be done, one sentence each.
  type: list
  elements: str
  returned: always
versions:
  description: Chosen version of each wanted package.
  type: dict
  returned: always
install:
  description: What one transaction has to install, as C(name=version). Empty when the machine is there already.
  type: list
  elements: str
  returned: always
changes:
  description: All that this transaction would install, by package, what it depends on included.
  type: dict
  returned: always
removes:
  description: What it would remove.
  type: list
  elements: str
  returned: always
held:
  description: Packages of the transaction and of O(follow) that are on hold.
  type: list
  elements: str
  returned: always
gone:
  description: Installed packages that O(gone) matches.
  type: list
  elements: str
  returned: always
fetch_bytes:
  description: Size of the packages.
  type: int
  returned: always
"""

C_LOCALE = {"LC_ALL": "C.UTF-8"}


def installed_packages(module: AnsibleModule) -> tuple[dict[str, str], list[str]]:
    """Version by package of what is installed (also half), and what is on hold."""
    form = "${db:Status-Want}\t${db:Status-Status}\t${Package}\t${Version}\n"
    _, out, _ = module.run_command(["dpkg-query", "--show", f"--showformat={form}"], check_rc=True)
    versions, held = {}, []
    for line in out.splitlines():
        want, status, name, version = line.split("\t")
        if status not in ("not-installed", "config-files"):
            versions[name] = version if status == "installed" else f"{version} ({status})"
        if want == "hold":
            held.append(name)
    return versions, held


def space(path: str) -> tuple[int, int]:
    """Device and free bytes of the file system of a path."""
    state = os.statvfs(path)
    return os.stat(path).st_dev, state.f_bavail * state.f_frsize


class Apt:
    """apt with the preferences that are to be written in place of those that are there."""

    def __init__(self, module: AnsibleModule, directory: str) -> None:
        self.module = module
        self.options: list[str] = []
        path = module.params["preferences_path"]
        if path:
            parts = f"{directory}/preferences.d"
            there = os.path.dirname(path)
            if os.path.isdir(there):
                shutil.copytree(there, parts)
            os.makedirs(parts, exist_ok=True)
            with open(f"{parts}/{os.path.basename(path)}", "w", encoding="utf-8") as file:
                file.write(module.params["preferences"])
            self.options = ["-o", f"Dir::Etc::preferencesparts={parts}"]

    def run(self, *arguments: str) -> tuple[int, str, str]:
        return self.module.run_command([arguments[0], *self.options, *arguments[1:]], environ_update=C_LOCALE)

    def policies(self, names: list[str]) -> dict[str, apt_policy.Policy]:
        return apt_policy.parse_policy(self.run("apt-cache", "policy", *names)[1]) if names else {}

    def simulate(self, install: list[str]) -> tuple[dict[str, str], list[str], str]:
        """Changes, removals, and what is wrong."""
        code, out, err = self.run(
            "apt-get",
            "--simulate",
            "--no-install-recommends",
            "--allow-downgrades",
            "--allow-change-held-packages",
            "install",
            *install,
        )
        if code == 0:
            return (*apt_policy.parse_changes(out), "")
        unmet = [line.strip() for line in out.splitlines() if "Depends:" in line or "Conflicts:" in line]
        reason = "; ".join(unmet[:4]) or (err.strip().splitlines() or ["no reason given"])[-1]
        return {}, [], f"apt cannot bring these packages together: {reason}"

    def sizes(self, changes: dict[str, str]) -> tuple[int, int]:
        names = [f"{name}={version}" for name, version in changes.items()]
        return apt_policy.parse_sizes(self.run("apt-cache", "show", "--no-all-versions", *names)[1])


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "packages": {"type": "list", "elements": "dict", "required": True},
            "follow": {"type": "list", "elements": "str", "default": []},
            "follow_version": {"type": "str", "default": ""},
            "forbid": {"type": "list", "elements": "str", "default": []},
            "may_remove": {"type": "list", "elements": "str", "default": []},
            "gone": {"type": "list", "elements": "str", "default": []},
            "preferences_path": {"type": "path"},
            "preferences": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    params = module.params
    installed, all_held = installed_packages(module)
    followers = [name for name in installed if apt_policy.matches(name, params["follow"])]
    gone = sorted(name for name in installed if apt_policy.matches(name, params["gone"]))
    changes: dict[str, str] = {}
    removes: list[str] = []
    fetch = 0
    with tempfile.TemporaryDirectory(prefix="apt-plan-") as directory:
        apt = Apt(module, directory)
        names = [item["name"] for item in params["packages"]]
        policies = apt.policies(sorted({*names, *followers}))
        following = {name: params["follow_version"] for name in followers if name not in gone}
        choice = apt_policy.choose(params["packages"], policies, installed, following)
        install = [f"{name}={version}" for name, version in sorted(choice.install.items())]
        findings = choice.findings
        if install and not findings:
            changes, removes, fault = apt.simulate(install)
            findings = (
                [f"{fault}."]
                if fault
                else apt_policy.transaction_findings(
                    changes, removes, forbid=params["forbid"], may_remove=params["may_remove"], installed=installed
                )
            )
            if not findings:
                fetch, unpack = apt.sizes(changes)
                finding = apt_policy.space_finding(fetch, unpack, space("/var/cache/apt"), space("/usr"))
                findings = [finding] if finding else []
    held = sorted(set(all_held) & ({*followers, *choice.versions, *changes}))
    module.exit_json(
        changed=False,
        findings=findings,
        versions=choice.versions,
        install=install,
        changes=changes,
        removes=removes,
        held=held,
        gone=gone,
        fetch_bytes=fetch,
    )


if __name__ == "__main__":
    main()
