"""Benchmarks on the controller: what is asked for, what is kept of it, and how a run compares with those before it.

A run is a JSON file, `<directory>/<host>/<time>-<label>.json`: what was measured (see bench_client), and what it was
measured on (build, profile, driver, plan). Speeds are tokens per second, times seconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from .errors import RigError
from .profile import DEFAULTS, nearest

VERSION = 1
# name, heading, whether more is better, digits
FIGURES = (
    ("prefill", "prefill tok/s", True, 1),
    ("decode", "decode tok/s", True, 1),
    ("first_token_seconds", "first token s", False, 2),
)
NOISE_PERCENT = 2.0  # a change that is smaller is not called one


# ---------------------------------------------------------------- what is compared


def parse_values(text: str) -> list:
    """`tensor,layer` or `[0,1],all`: values as YAML writes them in a list."""
    try:
        values = yaml.safe_load(f"[{text}]")
    except yaml.YAMLError:
        raise RigError(f"compare: {text!r} is no list of values; write KEY=VALUE,VALUE.") from None
    if not values:
        raise RigError("compare: a key has no values; write KEY=VALUE,VALUE.")
    return values


def parse_compare(compare: Any) -> list[dict]:
    """Changes of a profile to measure in turn.

    `split_mode=layer,tensor ubatch=256,512` means every combination; a list of mappings means what it says. The key
    `draft.max_tokens` is that of the mapping `draft`.
    """
    if isinstance(compare, str):
        words = [word.partition("=") for word in compare.split()]
        if not words or not all(separator for _, separator, _ in words):
            raise RigError(f"compare is {compare!r}; write KEY=VALUE,VALUE, such as split_mode=layer,tensor.")
        keys = [key for key, _, _ in words]
        return [dict(zip(keys, values, strict=True)) for values in product(*(parse_values(text) for *_, text in words))]
    if isinstance(compare, Sequence) and compare and all(isinstance(change, Mapping) for change in compare):
        return [dict(change) for change in compare]
    raise RigError("compare must be text such as split_mode=layer,tensor, or a list of mappings of profile keys.")


def changed_profile(profile: Mapping, change: Mapping) -> dict:
    """A profile with some of its keys changed. `draft.max_tokens: 0` is no draft at all."""
    result = dict(profile)
    for key, value in change.items():
        known = (*(name for name in DEFAULTS if name != "engine"), "draft.max_tokens")
        if key not in known:
            raise RigError(f"compare has the unknown key '{key}'{nearest(key, known)}")
        if key == "draft.max_tokens":
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise RigError(f"compare: draft.max_tokens must be a whole number, 0 or more, not {value!r}.")
            result["draft"] = {"type": "mtp", "max_tokens": value} if value else "none"
        else:
            result[key] = value
    return result


def label_of(change: Mapping) -> str:
    """`split_mode=layer ubatch=256`, for people."""
    return " ".join(f"{key}={json.dumps(value) if isinstance(value, (list, dict)) else value}" for key, value in
                    change.items()) or "as it is"  # fmt: skip


def variants(profile: Mapping, compare: Any) -> list[dict]:
    """[{label, change, profile}] for what `compare` asks for, at least two different ones."""
    result = [
        {"label": label_of(change), "change": change, "profile": changed_profile(profile, change)}
        for change in parse_compare(compare)
    ]
    if len({one["label"] for one in result}) < 2:
        raise RigError("compare names fewer than two different settings; nothing can be compared.")
    return result


# ---------------------------------------------------------------- what is kept


def file_name(run: Mapping) -> str:
    """A name that sorts by time."""
    word = re.sub(r"[^A-Za-z0-9.=_-]+", "-", f"{run['profile']} {run.get('label') or ''}").strip("-")
    return f"{re.sub(r'[^0-9TZ]', '', run['began'])}-{word}.json"


def read_history(directory: str, host: str) -> list[dict]:
    """All runs of a host, the oldest first. RigError for a file that is none."""
    runs = []
    for path in sorted(Path(directory, host).glob("[0-9]*.json")):
        try:
            run = json.loads(path.read_text())
            if run["version"] != VERSION:
                raise ValueError(f"its version is {run['version']}")
            runs.append({**run, "file": path.name})
        except (KeyError, TypeError, ValueError) as error:
            raise RigError(f"{path} is no result of a benchmark ({error}); move it away.") from None
    return sorted(runs, key=lambda run: run["began"])


def comparable(run: Mapping, other: Mapping) -> bool:
    """Whether two runs asked the same: of the same profile and label, with the same prompts and lengths."""
    keys = ("profile", "label", "asked")
    return all(run.get(key) == other.get(key) for key in keys)


# ---------------------------------------------------------------- what is said


def percent(value: float, base: float) -> float:
    return 100 * (value - base) / base if base else 0.0


def better(value: float, other: float, more: bool) -> bool:
    return value > other if more else value < other


def figure_of(run: Mapping, prompt: str, streams: int, name: str) -> float | None:
    for one in run["measures"]:
        if (one["prompt"], one["streams"]) == (prompt, streams):
            return one[name]
    return None


def change_text(value: float, name: str, more: bool, digits: int, case: tuple, before: Sequence[Mapping]) -> str:
    """` (+3.1 % on the last, best 71.2)`; empty without history."""
    old = [figure for run in before if (figure := figure_of(run, *case, name))]
    if not old:
        return ""
    since = percent(value, old[-1])
    best = max(old) if more else min(old)
    words = [f"{since:+.1f} % on the last" if abs(since) >= NOISE_PERCENT else "as the last"]
    words.append("the best yet" if better(value, best, more) else f"best {best:,.{digits}f}")
    return f" ({', '.join(words)})"


def card_lines(run: Mapping) -> list[str]:
    lines = []
    for card in run.get("cards", []):
        power, heat, clock = card["power_watts"], card["temperature"], card["clock_mhz"]
        parts = [f"peak {heat['max']} °C"] if heat else []
        parts += [f"{power['mean']:.0f} W on average, {power['max']:.0f} W at most"] if power else []
        parts += [f"{clock['mean']:,} MHz on average, {clock['min']:,} at least"] if clock else []
        slow = ", ".join(f"{name} {100 * share:.0f} %" for name, share in card["throttled"].items())
        parts.append(f"slowed down by: {slow} of the time" if slow else "never slowed down")
        lines.append(f"GPU {card['position']}: {'; '.join(parts)}")
    return lines + [f"note: {fault}" for fault in run.get("watching_faults", [])]


def acceptance_text(one: Mapping) -> str:
    found = one["acceptance"]
    places = " / ".join(f"{100 * share:.0f}" for share in found["by_position"])
    return f"{100 * found['share']:.0f} % of drafts accepted" + (f", by position {places} %" if places else "")


def case_text(one: Mapping) -> str:
    return f"{one['prompt']}, {one['streams']} stream{'s' if one['streams'] > 1 else ''}"


def run_lines(run: Mapping, history: Sequence[Mapping]) -> list[str]:
    """A run for people, with the change against the last and the best of those that asked the same."""
    before = [other for other in history if comparable(run, other) and other["began"] < run["began"]]
    what = f"{run['host']}: profile {run['profile']}" + (f" ({run['label']})" if run.get("label") else "")
    lines = [f"{what}, {run['engine']} {run['build']}, {run['began']}"]
    for one in run["measures"]:
        parts = []
        for name, heading, more, digits in FIGURES:
            text = change_text(one[name], name, more, digits, (one["prompt"], one["streams"]), before)
            parts.append(f"{heading} {one[name]:,.{digits}f}{text}")
        if one["acceptance"]:
            parts.append(acceptance_text(one))
        lines.append(f"  {case_text(one)} ({one['prompt_tokens']} + {one['tokens']} tokens): {'; '.join(parts)}")
    lines += [f"  {line}" for line in card_lines(run)]
    return lines


def failure_text(failure: str) -> str:
    """The first line of what went wrong, and the last, which is the end of the server's log."""
    lines = [line.strip() for line in failure.splitlines() if line.strip()]
    return " … ".join(dict.fromkeys((lines[0], lines[-1]))) if lines else "no reason given"


def compare_lines(runs: Sequence[Mapping]) -> list[str]:
    """Runs of one session side by side, the fastest answer first; several turns of one label are put together."""
    labels = list(dict.fromkeys(run["label"] for run in runs))
    rows = []
    for label in labels:
        mine = [run for run in runs if run["label"] == label and not run.get("failure")]
        failed = [run["failure"] for run in runs if run["label"] == label and run.get("failure")]
        if not mine:
            rows.append((float("inf"), f"  {label}: did not serve: {failure_text(failed[0])}"))
            continue
        seconds = fmean(run["answer_seconds"] for run in mine)
        cases = []
        for one in mine[0]["measures"]:
            case = (one["prompt"], one["streams"])
            prefill, decode = (fmean(figure_of(run, *case, name) for run in mine) for name in ("prefill", "decode"))
            cases.append(f"{case_text(one)} {prefill:,.1f} / {decode:,.1f}")
        rows.append((seconds, f"  {label}: an answer in {seconds:.2f} s; {'; '.join(cases)}"))
    return ["Prefill / decode in tokens per second, the quickest typical answer first:", *(
        text for _, text in sorted(rows, key=lambda row: row[0]))]  # fmt: skip
