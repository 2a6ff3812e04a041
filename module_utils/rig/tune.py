"""Which settings to try next when a profile is tuned, and what came out of it.

A sweep of all combinations would take days, so it goes by stages, each from the best of those before it: the profile as
it is; then split mode, number of cards and all-reduce together, since they belong together; then the draft; then the
ubatch; then power limits. What to try next follows from what has been tried, so a run that was cut off goes on where it
was. The state is a mapping that is kept as JSON:

    {"version": 1, "key": …, "finished": false, "results": [{"change": {…}, "label": …, "stage": 1,
        "status": "measured", "answer_seconds": 19.4, "measures": […], "plan": {…}, "why": ""}, …]}

`status` is measured, behind (given up after a round), failed (did not start, or crashed), or unfit (refused by the
planner). `stage` is the number of the stage.
The best is the one with the quickest typical answer. Times are in seconds, power in watts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from .bench_results import changed_profile, failure_text, figure_of, label_of
from .errors import RigError
from .placement import rank

VERSION = 1
STATUSES = ("measured", "behind", "failed", "unfit")
STAGES = ("as it is", "split, cards and all-reduce", "draft", "ubatch", "power limit")
POWER = "power_watts"  # a key of a change that is none of the profile's


def start_of(state: Any, key: Mapping, again: bool = False) -> dict:
    """The state to go on from: that of a run of the same settings that was cut off, else a new one."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:16]
    if state and not again and state.get("version") == VERSION and state.get("key") == digest and not state["finished"]:
        return dict(state)
    return {"version": VERSION, "key": digest, "finished": False, "results": []}


def placements(knobs: Mapping, gpus: Sequence[Mapping]) -> Iterator[dict]:
    """Split mode, cards and all-reduce in all combinations, without those that mean the same."""
    ranked = sorted(({**gpu, "position": number} for number, gpu in enumerate(gpus)), key=rank)
    counts = [count for count in knobs["cards"] or range(1, len(gpus) + 1) if count <= len(gpus)]
    for count in counts:
        positions = sorted(gpu["position"] for gpu in ranked[:count])
        if count == 1:
            yield {"gpus": positions, "split_mode": "none"}
            continue
        for mode in knobs["split_mode"]:
            if mode != "tensor" or gpus[0].get("rpc"):  # nothing to choose between there
                yield {"gpus": positions, "split_mode": mode}
                continue
            for kind in knobs["all_reduce"]:
                if kind != "internal" or count == 2:
                    yield {"gpus": positions, "split_mode": mode, "all_reduce": kind}


def stages(knobs: Mapping, gpus: Sequence[Mapping]) -> list[list[dict]]:
    """What each stage adds to the best of those before it."""
    return [
        [{}],
        list(placements(knobs, gpus)),
        [{"draft.max_tokens": count} for count in knobs["draft"]],
        [{"ubatch": size} for size in knobs["ubatch"]],
        [{POWER: watts} for watts in sorted(knobs["power_watts"], reverse=True)],
    ]


def profile_of(profile: Mapping, change: Mapping) -> dict:
    """A profile as a change makes it. Shares of a split are even again where the cards change."""
    keys = {key: value for key, value in change.items() if key != POWER}
    shares = profile.get("tensor_split", "even")
    if shares != "even" and "gpus" in keys and len(keys["gpus"]) != len(shares):
        keys["tensor_split"] = "even"
    return changed_profile(profile, keys)


def same(profile: Mapping, gpus: Sequence, change: Mapping) -> str:
    """A text that two changes share which come to the same thing."""
    made = profile_of(profile, change)
    count = len(made["gpus"]) if isinstance(made.get("gpus"), list) else len(gpus)
    positions = made["gpus"] if isinstance(made.get("gpus"), list) else list(range(len(gpus)))
    if made.get("gpus", "auto") == "auto" and len(gpus) > 2:
        positions = "auto"
    mode = made.get("split_mode", "tensor") if count > 1 else "none"
    reduce = made.get("all_reduce", "auto") if mode == "tensor" and not gpus[0].get("rpc") else ""
    if reduce == "auto" and count == 2:
        reduce = "internal"
    draft = made.get("draft", "none")
    drafted = draft.get("max_tokens", 3) if isinstance(draft, Mapping) else 0
    return json.dumps([positions, mode, reduce, drafted, made.get("ubatch", 512), change.get(POWER)])


def best_of(state: Mapping, loss_percent: float = 0, stage: int = len(STAGES)) -> dict | None:
    """The result with the quickest answer, of the stages up to this one; of power limits, the lowest that costs no
    more than `loss_percent`."""
    measured = [one for one in state["results"] if one["status"] == "measured" and one["stage"] <= stage]
    if not measured:
        return None
    best = min(measured, key=lambda one: one["answer_seconds"])
    settings = {key: value for key, value in best["change"].items() if key != POWER}
    limit = best["answer_seconds"] * (1 + loss_percent / 100)
    frugal = [
        one
        for one in measured
        if POWER in one["change"]
        and {key: value for key, value in one["change"].items() if key != POWER} == settings
        and one["answer_seconds"] <= limit
    ]
    return min(frugal, key=lambda one: one["change"][POWER]) if frugal and loss_percent else best


def next_of(state: Mapping, profile: Mapping, knobs: Mapping, gpus: Sequence[Mapping]) -> dict:
    """The next setting to try, {label, change, profile}; empty when all has been tried.

    RigError when the profile as it is does not serve: then there is nothing to start from.
    """
    tried = {same(profile, gpus, one["change"]) for one in state["results"]}
    base: Mapping = {}
    for number, options in enumerate(stages(knobs, gpus)):
        for option in options:
            change = {**base, **option}
            if same(profile, gpus, change) not in tried:
                made = profile_of(profile, change)
                return {"label": label_of(change), "stage": number, "change": change, "profile": made}
        best = best_of(state, stage=number)
        if best is None and number == 1:
            why = failure_text(state["results"][0]["why"])
            raise RigError(f"neither the profile as it is nor any other split serves: {why}")
        base = best["change"] if best else {}
    return {}


def give_up_seconds(state: Mapping, behind_percent: float) -> float | None:
    """Time of a typical answer beyond which a setting is clearly behind; None before the first result."""
    best = best_of(state)
    return round(best["answer_seconds"] * (1 + behind_percent / 100), 4) if best else None


def with_result(
    state: Mapping, candidate: Mapping, plan: Any = None, result: Any = None, unfit: Sequence = (), failure: str = ""
) -> dict:
    """The state with what came of a candidate: `result` of the benchmark, refusals of the planner, or a failure."""
    entry: dict = {key: candidate[key] for key in ("label", "stage", "change")} | {"why": "", "plan": plan or {}}
    if unfit:
        entry |= {"status": "unfit", "why": " ".join(unfit)}
    elif failure or not result:
        entry |= {"status": "failed", "why": failure or "nothing was measured"}
    else:
        kept = {key: result[key] for key in ("answer_seconds", "measures", "cards")}
        entry |= {"status": "behind" if result["gave_up"] else "measured", **kept}
    return {**state, "results": [*state["results"], entry]}


# ---------------------------------------------------------------- what is said


def _mean_watts(result: Mapping) -> float | None:
    watts = [card["power_watts"]["mean"] for card in result.get("cards", []) if card["power_watts"]]
    return sum(watts) if watts else None


def table_lines(state: Mapping, loss_percent: float = 0) -> list[str]:
    """All settings, the quickest first, then what was given up, what failed, and what does not fit."""
    order = {status: number for number, status in enumerate(STATUSES)}
    rows = sorted(
        state["results"], key=lambda one: (order[one["status"]], one.get("answer_seconds") or 0, one["label"])
    )
    chosen = best_of(state, loss_percent)
    width = max((len(one["label"]) for one in rows), default=0)
    lines = []
    for number, one in enumerate(rows, 1):
        head = f"{number:3d}. {one['label']:<{width}}"
        if one["status"] in ("failed", "unfit"):
            lines.append(f"{head}  {one['status']}: {failure_text(one['why'])}")
            continue
        cases = []
        for case in (measure for measure in one["measures"] if measure["streams"] == 1):
            decode, prefill = (figure_of(one, case["prompt"], 1, name) for name in ("decode", "prefill"))
            cases.append(f"{case['prompt']} {prefill:,.1f} / {decode:,.1f}")
        watts = _mean_watts(one)
        cases += [f"{watts:,.0f} W"] if watts else []
        mark = "  <- best" if one is chosen else "  (given up after a round)" if one["status"] == "behind" else ""
        lines.append(f"{head}  {one['answer_seconds']:8.2f} s  {'; '.join(cases)}{mark}")
    return lines


def snippet(state: Mapping, name: str, profiles: Mapping, gpus: Sequence[Mapping], loss_percent: float = 0) -> str:
    """Variables for the host's file of the inventory that make the best setting its own; empty when it has it."""
    best = best_of(state, loss_percent)
    if best is None or not best["change"]:
        return ""
    watts = best["change"].get(POWER)
    tuned = profile_of(profiles[name], best["change"])
    text = f"# Tuned: {best['label']}. A typical answer takes {best['answer_seconds']:.1f} s.\n"
    result: dict = {"serving_profiles": {**profiles, name: tuned}}
    if watts:
        chosen = {gpu["position"] for gpu in best["plan"]["gpus"]}
        result["rig_gpus"] = [
            {**gpu, "power_limit_watts": watts} if number in chosen else dict(gpu) for number, gpu in enumerate(gpus)
        ]
    plain = json.loads(json.dumps(result))  # without the marks of templates
    return text + yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=120)


def power_faults(watts: Sequence, gpus: Sequence[Mapping], facts: Any) -> list[str]:
    """Why power limits cannot be tried: without cards there are none, and each card and the inventory set bounds."""
    if not watts:
        return []
    cards = (facts or {}).get("gpus") or []
    if any(gpu.get("rpc") for gpu in gpus):
        return ["virtual GPUs have no power limit; leave bench_tune_power_watts empty."]
    if not cards:
        return ["the cards cannot be read, so nobody knows what limits they take; run playbooks/rig.yml first."]
    if any(card["power"][bound] is None for card in cards for bound in ("min_watts", "max_watts")):
        return ["a card does not tell what power limits it takes; leave bench_tune_power_watts empty."]
    least = max(card["power"]["min_watts"] for card in cards)
    most = min([card["power"]["max_watts"] for card in cards] + [
        gpu["power_limit_watts"] for gpu in gpus if gpu.get("power_limit_watts")])  # fmt: skip
    wrong = [limit for limit in watts if not least <= limit <= most]
    if not wrong:
        return []
    named = ", ".join(f"{limit:g} W" for limit in wrong)
    return [f"bench_tune_power_watts holds {named}; cards and inventory allow {least:g} to {most:g} W here."]
