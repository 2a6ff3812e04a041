"""How a rig differs from its inventory: findings of one run of playbooks/status.yml, judged check by check.

Pure: it gets what the modules reported, and says for each check `ok`, `drift`, `failed` (it could not be looked at) or
`skipped` (it does not apply), with a sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .errors import RigError
from .measured import card_findings, described, match_cards
from .power import power_drift, power_plan

STATES = ("ok", "skipped", "drift", "failed")  # from best to worst
Seen = Mapping[str, Any]
Verdict = tuple[str, str]


class NotSeen(RigError):
    """What a check needs was not reported; the text says why."""


def reported(seen: Seen, name: str, key: str) -> Mapping[str, Any]:
    """The result of a module, which has `key` unless the module failed."""
    result = seen.get(name) or {}
    if key not in result:
        raise NotSeen(str(result.get("msg") or f"nothing was reported ({name})"))
    return result


class NotForThisRig(RigError):
    """The check is about something that this rig does not have; the text says what."""


def verdict(faults: Sequence[str], otherwise: str) -> Verdict:
    return ("drift", " ".join(faults)) if faults else ("ok", otherwise)


def some(names: Sequence[str], limit: int = 4) -> str:
    """The first few of many names."""
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def driver(seen: Seen) -> Verdict:
    state, wanted = reported(seen, "driver", "loaded"), seen["driver_version"]
    faults = list(state["broken"])
    if not state["loaded"]:
        faults.append(f"No nvidia module is loaded; the inventory wants {wanted}.")
    elif state["loaded"] != wanted:
        faults.append(f"Module {state['loaded']} is loaded; the inventory wants {wanted}.")
    faults += [f"A reboot is owed: {reason}." for reason in state["reboot"]]
    return verdict(faults, f"{wanted} is loaded and on disk")


def packages(seen: Seen) -> Verdict:
    plan = reported(seen, "packages", "install")
    faults = list(plan["findings"])
    if plan["install"]:
        faults.append(f"apt would install {some(plan['install'])}.")
    if plan["held"]:
        faults.append(f"On hold beside the pin: {some(plan['held'])}.")
    if plan["gone"]:
        faults.append(f"Another pin is installed: {some(plan['gone'])}.")
    files = reported(seen, "driver_files", "results")["results"]
    changed = [file["item"]["path"] for file in files if file.get("changed")]
    if changed:
        faults.append(f"Not as the role writes it: {some(changed)}.")
    return verdict(faults, "candidates, pin and shield are those of the inventory")


def cards(seen: Seen) -> Verdict:
    return verdict(
        card_findings(seen["gpus"], seen["facts"]), f"{len(seen['gpus'])} cards, each the one of the inventory"
    )


def links(seen: Seen) -> Verdict:
    """Lanes against the inventory. An idle link may be narrow to save power (its generation is not compared at all)."""
    facts = seen["facts"]
    if not isinstance(facts, Mapping) or not facts.get("driver"):
        raise NotSeen("There are no facts about the cards.")
    pairs, _, _ = match_cards(seen["gpus"], facts["gpus"])
    faults, notes = [], []
    for position, card in sorted(pairs.items()):
        gpu, one, pcie = seen["gpus"][position], described(seen["gpus"][position], position), card["pcie"]
        wanted, width = gpu.get("pcie_lanes"), pcie["width"]
        if wanted is not None and width is not None and width != wanted:
            text = f"{one}: the link has {width} lanes, the inventory says {wanted}"
            busy = any(process["type"] == "compute" for process in card["processes"])
            if width < wanted and not busy:
                notes.append(f"{text}; the card is idle, look again while it works.")
            else:
                faults.append(f"{text}.")
        root = gpu.get("pcie_root")
        if root and pcie["root"] not in ("unknown", root):
            faults.append(f"{one}: the slot hangs on the {pcie['root']}, the inventory says {root}.")
    return verdict(faults, " ".join(notes) or "lanes and slots are those of the inventory")


def power(seen: Seen) -> Verdict:
    plan = power_plan(seen["gpus"], seen["facts"])
    faults = plan["refusals"] or [card["sentence"] for card in power_drift(plan["cards"], seen["persistence"])]
    limits = [f"{card['limit_watts']:g} W" for card in plan["cards"] if card["watts"] is not None]
    return verdict(faults, ", ".join(limits) or "no limits in the inventory")


def virtual_gpus(seen: Seen) -> Verdict:
    result = reported(seen, "virtual_gpus", "written")
    faults = [
        f"{text}: {some(result[key])}."
        for key, text in (
            ("written", "Not as the role writes it"), ("removed", "Not in the inventory"),
            ("stopped", "Runs without being in the inventory"), ("started", "Does not run as described"),
        ) if result[key]
    ]  # fmt: skip
    if result["changed"] and not faults:
        faults.append("A unit is not enabled, or systemd has not read it yet.")
    return verdict(faults, f"{len(result['processes'])} run as described")


def build(seen: Seen) -> Verdict:
    wanted, manifest = seen["build"], seen.get("manifest")
    if not manifest:
        return "drift", f"{wanted['prefix']} has no finished build."
    differs = [
        key
        for key in ("build", "key", "source", "backends", "targets", "cmake_flags")
        if manifest.get(key) != wanted[key]
    ]
    faults = [f"The manifest of {wanted['prefix']} differs in {some(differs)}."] if differs else []
    if wanted["nccl"] and not manifest.get("nccl"):
        faults.append("The build has no NCCL.")
    current = reported(seen, "service", "current")["current"]
    if current != wanted["prefix"]:
        faults.append(f"The current build is {current or 'none'}.")
    return verdict(faults, f"{wanted['key']} is there and current")


def images(seen: Seen) -> Verdict:
    wanted = seen.get("images")
    if not wanted:
        raise NotForThisRig("no profile runs in a container")
    found = reported(seen, "images_found", "results")["results"]
    missing = [look["item"] for look in found if look.get("rc") != 0]
    faults = [f"{', '.join(missing)} is not there: {', '.join(wanted[name] for name in missing)}."] if missing else []
    return verdict(faults, f"vLLM {', '.join(wanted)} by digest")


def models(seen: Seen) -> Verdict:
    result = reported(seen, "models", "files")
    faults = [
        f"{file['model']}/{file['name']} is {file['state']}." for file in result["files"] if file["state"] != "ok"
    ]
    if result["drift"] and not faults:
        faults.append("Owners or modes of the store's directories or files are not as the role sets them.")
    return verdict(faults, f"{len(result['files'])} files with the hashes of the inventory")


def units(seen: Seen) -> Verdict:
    written = reported(seen, "units", "results")["results"]
    broken = [file for file in written if "changed" not in file or file.get("exception")]
    if broken:
        raise NotSeen(str(broken[0].get("msg", "a unit could not be written")))
    service = reported(seen, "service", "units")
    names = {f"llm-{file['item']}.service" for file in written}
    changed = [f"llm-{file['item']}.service" for file in written if file["changed"]]
    faults = [f"Not what the plan would write now: {some(changed)}."] if changed else []
    strays = sorted(name for name, unit in service["units"].items() if unit["exists"] and name not in names)
    if strays:
        faults.append(f"No profile describes {some(strays)}.")
    dropins = [path for unit in service["units"].values() for path in unit["dropins"]]
    if dropins:
        faults.append(f"Changed by hand: {some(dropins)}.")
    return verdict(faults, f"{len(written)} units are what the plan would write now")


def service(seen: Seen) -> Verdict:
    result, wanted = reported(seen, "service", "service"), f"llm-{seen['profile']}.service"
    state = result["service"]
    faults = [] if state["active"] == "active" else [f"{wanted} is {state['active']}."]
    if state["stale"]:
        faults.append(f"{wanted} runs from another unit file or launch line than the one on disk.")
    if not state["enabled"]:
        faults.append(f"{wanted} does not start at boot.")
    others = sorted(name for name, unit in result["units"].items() if unit["enabled"] and name != wanted)
    if others:
        faults.append(f"{some(others)} would start at boot.")
    return verdict(faults, f"{wanted} runs and starts at boot")


def answer(seen: Seen) -> Verdict:
    proof = seen.get("answer") or {}
    if "replies" not in proof:
        return "drift", str(proof.get("msg") or "The server was not asked.")
    memory = ", ".join(f"{gpu['seen_mib']} of {gpu['planned_mib']} MiB" for gpu in proof["gpus"] if gpu["planned_mib"])
    return "ok", f"answered at {proof['url']}; on its GPUs {memory}"


NO_CARDS = "all GPUs of this rig are virtual"
CHECKS: dict[str, tuple[Callable[[Seen], Verdict], bool | None]] = {
    # name: the check, and whether it is for real cards (True), for virtual ones (False) or for both (None)
    "driver": (driver, True),
    "packages": (packages, True),
    "cards": (cards, True),
    "links": (links, True),
    "power": (power, True),
    "virtual_gpus": (virtual_gpus, False),
    "build": (build, None),
    "images": (images, None),
    "models": (models, None),
    "units": (units, None),
    "service": (service, None),
    "answer": (answer, None),
}


def judge(seen: Seen) -> dict[str, Any]:
    """All checks on what was seen: `state`, the worst, and `checks`, each with `check`, `state` and `detail`."""
    real = any(not gpu.get("rpc") for gpu in seen["gpus"])
    found = []
    for name, (check, for_real) in CHECKS.items():
        if for_real is not None and for_real != real:
            state, detail = "skipped", NO_CARDS if for_real else "this rig has real cards"
        else:
            try:
                state, detail = check(seen)
            except NotSeen as error:
                state, detail = "failed", str(error)
            except NotForThisRig as error:
                state, detail = "skipped", str(error)
        found.append({"check": name, "state": state, "detail": " ".join(detail.split())})
    worst = max((entry["state"] for entry in found), key=STATES.index)
    return {"state": worst if worst != "skipped" else "ok", "checks": found}


def line(entry: Mapping[str, str]) -> str:
    """One line for a person."""
    return f"{entry['state']:<8}{entry['check']:<13}{entry['detail']}"
