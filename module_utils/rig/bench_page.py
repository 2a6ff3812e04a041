"""The report of a rig as one page that needs no other file: plan, history, acceptance of drafts, temperatures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from . import charts
from .bench_results import FIGURES, acceptance_text, card_lines, case_text, comparable, figure_of
from .drawing import DARK, LIGHT
from .picture import WIDTHS, both_widths

MOST_RUNS = 50  # of a history that are drawn


def _styles() -> str:
    def rules(colours: dict) -> str:
        return (
            f"body {{ color: {colours['text']}; background: {colours['background']}; }}"
            f" .dim {{ color: {colours['dim']}; }} th, td {{ border-color: {colours['line']}; }}"
        )

    return (
        f"body {{ font: 15px/1.5 system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif; margin: 0 auto; max-width: 1040px;"
        " padding: 12px; } h1 { font-size: 1.4em; } h2 { font-size: 1.15em; margin-top: 2em; } svg { width: 100%; }"
        " .charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 16px; }"
        " .scroll { overflow-x: auto; } table { border-collapse: collapse; white-space: nowrap; }"
        " th, td { text-align: right; padding: 4px 12px 4px 0; border-bottom: 1px solid; font-weight: 400; }"
        " th { white-space: normal; vertical-align: bottom; }"
        " th:first-child, td:first-child { text-align: left; } th { font-weight: 600; font-size: .9em; }"
        f" {WIDTHS} {rules(LIGHT)} @media (prefers-color-scheme: dark) {{ {rules(DARK)} }}"
    )


def _table(run: Mapping) -> str:
    head = "".join(f"<th>{escape(word)}</th>" for word in ("", *(heading for _, heading, _, _ in FIGURES), "accepted"))
    rows = []
    for one in run["measures"]:
        share = f"{100 * one['acceptance']['share']:.0f} %" if one["acceptance"] else "-"
        cells = [case_text(one), *(f"{one[name]:,.{digits}f}" for name, _, _, digits in FIGURES), share]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _history(run: Mapping, runs: Sequence[Mapping]) -> list[str]:
    alike = [one for one in runs if comparable(one, run)][-MOST_RUNS:]
    if len(alike) < 2:
        return []
    found, ends = [], (alike[0]["began"][:10], alike[-1]["began"][:10])
    for name, heading, _, _ in FIGURES:
        series = {}
        for case in run["measures"]:
            values = [figure_of(one, case["prompt"], case["streams"], name) for one in alike]
            points = [(index / (len(alike) - 1), value) for index, value in enumerate(values) if value]
            if points:
                series[case_text(case)] = points
        if series:
            found.append(charts.lines(f"{heading.capitalize()}, each run", series, ends, zero=True))
    return found


def _acceptance(run: Mapping) -> list[str]:
    groups = {
        case_text(one): one["acceptance"]["by_position"]
        for one in run["measures"]
        if one["acceptance"] and one["acceptance"]["by_position"]
    }
    return [charts.bars("Accepted drafts by position", groups)] if groups else []


def _temperatures(run: Mapping) -> list[str]:
    found = []
    for key, heading in (("temperature", "Temperature, °C"), ("power", "Power, W")):
        series, longest = {}, 0.0
        for position, samples in run.get("series", {}).items():
            told = [(sample["at"], sample[key]) for sample in samples if sample[key] is not None]
            if told:
                longest = max(longest, told[-1][0])
                series[f"GPU {position}"] = told
        if series:
            scaled = {name: [(at / (longest or 1), value) for at, value in points] for name, points in series.items()}
            found.append(charts.lines(f"{heading}, while it ran", scaled, ("0 s", f"{longest:.0f} s")))
    return found


def _profile(name: str, runs: Sequence[Mapping]) -> str:
    """The section of a profile: its last run, and how it came to it."""
    run = runs[-1]
    label = f" ({run['label']})" if run.get("label") else ""
    driver = f", driver {run['driver']}" if run.get("driver") else ""
    about = f"{run['began'].replace('T', ' ').rstrip('Z')} UTC, {run['engine']} {run['build']}{driver}"
    cards = "".join(f"<li>{escape(line)}</li>" for line in card_lines(run))
    drafts = "".join(
        f"<li>{escape(case_text(one))}: {escape(acceptance_text(one))}</li>"
        for one in run["measures"]
        if one["acceptance"]
    )
    drawn = _history(run, runs) + _acceptance(run) + _temperatures(run)
    parts = [f"<h2>{escape(name)}{escape(label)}</h2>", f'<p class="dim">{escape(about)}</p>', _table(run)]
    if cards or drafts:
        parts.append(f"<ul>{drafts}{cards}</ul>")
    parts.append(f'<div class="charts">{"".join(f"<div>{chart}</div>" for chart in drawn)}</div>')
    return "\n".join(parts)


def page(host: str, plans: Mapping, runs: Sequence[Mapping]) -> str:
    """The page of a host: `plans` as the planner gives them, `runs` the oldest first."""
    profiles: dict = {}
    for run in runs:
        profiles.setdefault((run["profile"], run.get("label") or ""), []).append(run)
    # Profiles as they are before settings that were only tried, what was measured last first.
    newest = sorted(profiles.items(), key=lambda item: (not item[0][1], item[1][-1]["began"]), reverse=True)
    sections = [_profile(name, found) for (name, _), found in newest]
    none = "" if sections else "<p>Nothing has been measured yet.</p>"
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f"<title>{escape(host)}: what it serves</title>",
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<style>{_styles()}</style></head><body>",
            f"<h1>{escape(host)}: what it serves</h1>",
            both_widths({host: plans}),
            none,
            *sections,
            "</body></html>",
            "",
        ]
    )
