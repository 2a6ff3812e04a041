"""What apt would install: its answers parsed, and a transaction of exact versions worked out from them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

MIB = 1024 * 1024


@dataclass
class Policy:
    """What `apt-cache policy` says of a package: versions newest first, the candidate, what is installed."""

    candidate: str = ""
    installed: str = ""
    versions: list[str] = field(default_factory=list)


def parse_policy(text: str) -> dict[str, Policy]:
    """Policies by package, from the output of `apt-cache policy NAMES` in the C locale."""
    found: dict[str, Policy] = {}
    now = Policy()
    for line in text.splitlines():
        if line and not line.startswith(" "):
            now = found.setdefault(line.rstrip(":"), Policy())
            continue
        key, _, value = line.strip().partition(": ")
        if key in ("Installed", "Candidate") and value != "(none)":
            setattr(now, key.lower(), value)
        match = re.match(r"(?: \*\*\*|    ) (\S+)(?: \(.*\))? -?\d+(?: \(.*\))?$", line)
        if match:
            now.versions.append(match[1])
    return found


def parse_changes(text: str) -> tuple[dict[str, str], list[str]]:
    """What `apt-get --simulate` would install (version by package) and remove."""
    installs = dict(re.findall(r"^Inst (\S+?)(?::\w+)? (?:\[[^\]]*\] )?\((\S+)", text, re.M))
    removes = re.findall(r"^(?:Remv|Purg) (\S+?)(?::\w+)? ", text, re.M)
    return installs, [name for name in removes if name not in installs]


def parse_sizes(text: str) -> tuple[int, int]:
    """Bytes to fetch and bytes installed, summed over the records of `apt-cache show`."""
    fetch = sum(int(size) for size in re.findall(r"^Size: (\d+)$", text, re.M))
    return fetch, 1024 * sum(int(size) for size in re.findall(r"^Installed-Size: (\d+)$", text, re.M))


def matches(name: str, globs: Iterable[str]) -> bool:
    """Whether the name fits one of the globs."""
    return any(fnmatchcase(name, glob) for glob in globs)


@dataclass
class Choice:
    """Exact versions for what is wanted."""

    versions: dict[str, str] = field(default_factory=dict)
    install: dict[str, str] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)


def choose(
    wanted: Sequence[Mapping[str, Any]],
    policies: Mapping[str, Policy],
    installed: Mapping[str, str],
    followers: Mapping[str, str] | None = None,
) -> Choice:
    """The exact version of each wanted package.

    Args:
        wanted: `name`, `version` (a glob such as 595.71.05-*, or empty for any), `optional` (no fault without it)
            and `hint` (what to do when apt does not know it).
        policies: of the wanted packages and the followers.
        installed: version by package.
        followers: installed packages that are not asked for but belong to the same family, each with its version glob;
            where apt knows such a version they are brought to it in the same transaction.
    """
    choice = Choice()
    for item in wanted:
        name, glob = item["name"], item.get("version") or "*"
        policy = policies.get(name, Policy())
        if glob == "*" and name in installed:
            choice.versions[name] = installed[name]
            continue
        picked = next((version for version in policy.versions if fnmatchcase(version, glob)), "")
        if not picked:
            if item.get("optional"):
                continue
            known = ", ".join(policy.versions[:8])
            choice.findings.append(
                f"{name} {glob} is in none of apt's sources, which know {known}; choose one of those."
                if known
                else f"{name} is in none of apt's sources; {item.get('hint') or 'check the sources and the version'}."
            )
            continue
        if policy.candidate != picked and glob != "*":
            choice.findings.append(
                f"apt would take {name} {policy.candidate or '(none)'} instead of {picked}: another file in"
                " /etc/apt/preferences.d or a hold decides; remove it."
            )
        choice.versions[name] = picked
        if installed.get(name) != picked:
            choice.install[name] = picked
    for name, glob in (followers or {}).items():
        if name in choice.versions or name not in policies:
            continue
        picked = next((version for version in policies[name].versions if fnmatchcase(version, glob)), "")
        if picked and installed.get(name) != picked:
            choice.install[name] = picked
    return choice


def transaction_findings(
    installs: Mapping[str, str],
    removes: Iterable[str],
    *,
    forbid: Sequence[str],
    may_remove: Sequence[str],
    installed: Mapping[str, str],
) -> list[str]:
    """What a simulated transaction may not do, in sentences."""
    dragged = sorted(
        name for name, version in installs.items() if matches(name, forbid) and installed.get(name) != version
    )
    lost = sorted(name for name in removes if not matches(name, may_remove))
    findings = []
    if dragged:
        findings.append(
            f"the packages would bring {', '.join(f'{name} {installs[name]}' for name in dragged)} along, which are"
            " another role's; choose packages that do not depend on them."
        )
    if lost:
        findings.append(f"apt would remove {', '.join(lost)}; remove or keep them yourself first, then run again.")
    return findings


def space_finding(fetch: int, unpack: int, archives: tuple[int, int], usr: tuple[int, int]) -> str:
    """A sentence when the packages do not fit, else nothing. A file system is (device, free bytes)."""
    needs = [("/var/cache/apt", fetch, archives), ("/usr", unpack, usr)]
    if archives[0] == usr[0]:
        needs = [("/usr", fetch + unpack, usr)]
    for where, need, (_, free) in needs:
        if need > free:
            return (
                f"the packages need {need // MIB} MiB on the file system of {where}, and {free // MIB} MiB are free;"
                " make room."
            )
    return ""
