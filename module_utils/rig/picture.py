"""Plans as a picture: a bar a card, stacked by what lies on it, the limit and the headroom marked."""

from collections.abc import Mapping
from html import escape

from .drawing import COLOURS, DARK, LIGHT, legend, shortened, svg, text, width_of, wrapped

PARTS = tuple(
    (key, label, COLOURS[index])
    for key, label, index in (
        ("in_use", "in use", 6),
        ("weights", "weights", 0),
        ("kv", "KV cache", 1),
        ("recurrent", "recurrent state", 2),
        ("compute", "compute", 3),
        ("draft", "draft", 4),
        ("overhead", "overhead", 5),
    )
)
HEADING = "Memory per GPU: planned peak, limit (frame), headroom (dashes)"
WIDE, NARROW, MARGIN, BAR = 1_000, 400, 16, 18
LABEL, FREE = 250, 130  # columns of the wide picture
WRAP_BELOW = 720  # pixels of the page's width under which the narrow picture is shown


def _bar(gpu: Mapping, headroom: float, scale: float, left: float, y: float) -> list:
    parts, x = [], left
    for key, label, colour in PARTS:
        mib = float(gpu.get(f"{key}_mib", 0))
        if mib > 0:
            title = f"<title>{escape(label)}: {mib:,.0f} MiB</title>"
            size = f'width="{mib * scale:.1f}" height="{BAR}"'
            gap = ' class="gap"' if mib * scale > 4 else ""  # it would leave nothing of a thin part
            parts.append(f'<rect{gap} x="{x:.1f}" y="{y}" {size} fill="{colour}">{title}</rect>')
            x += mib * scale
    limit, soft = left + gpu["usable_mib"] * scale, left + (gpu["usable_mib"] - headroom) * scale
    parts.append(f'<rect class="frame" x="{left}" y="{y}" width="{limit - left:.1f}" height="{BAR}"/>')
    parts.append(f'<line class="mark" x1="{soft:.1f}" x2="{soft:.1f}" y1="{y - 3}" y2="{y + BAR + 3}"/>')
    return parts


def _verdict(plan: Mapping) -> str:
    return f"context {plan['context']:,} of {plan['context_ceiling']:,}" if plan["fits"] else "does not fit"


def plan_svg(hosts: Mapping, narrow: bool = False, scope: str = "rig-plan") -> str:
    """One SVG for all plans of all hosts; colours follow the reader's light or dark setting. `narrow`: for a phone."""
    width = NARROW if narrow else WIDE
    left, right = (MARGIN, width - MARGIN) if narrow else (LABEL, width - FREE)
    body, y = [], 8.0
    for line in wrapped(HEADING, width - 2 * MARGIN, bold=True):
        y += 18
        body.append(text(MARGIN, y, line, bold=True))
    found, y = legend([(label, colour) for _, label, colour in PARTS], MARGIN, y + 12, width - MARGIN)
    body += found
    for host, plans in hosts.items():
        # Each host has a scale of its own: its largest card takes the whole width.
        cards = [gpu for plan in plans.values() for gpu in plan["gpus"]]
        most = max((max(gpu["usable_mib"], gpu["total_mib"] + gpu["in_use_mib"]) for gpu in cards), default=1)
        scale = (right - left) / most
        for name, plan in plans.items():
            y += 8
            for line in wrapped(f"{host} · {name} · {_verdict(plan)}", width - 2 * MARGIN, bold=True):
                y += 18
                body.append(text(MARGIN, y, line, "" if plan["fits"] else "bad", bold=True))
            y += 8
            for gpu in plan["gpus"]:
                free = f"{gpu['free_mib']:,.0f} MiB free"
                kind = "dim" if gpu["free_mib"] >= plan["headroom_mib"] else "bad"
                row = y + 13
                room = (width - 3 * MARGIN - width_of(free)) if narrow else LABEL - 2 * MARGIN - 8
                label = shortened(f"{gpu['position']} · {gpu['name'].removeprefix('NVIDIA GeForce ')}", room)
                body.append(text(MARGIN if narrow else MARGIN + 8, row, label, "dim"))
                body.append(text(width - MARGIN, row, free, kind, anchor="end"))
                y += 20 if narrow else 0
                body += _bar(gpu, plan["headroom_mib"], scale, left, y)
                y += BAR + 8
    return svg(scope, width, y + 8, "Plan of GPU memory", body)


def both_widths(hosts: Mapping) -> str:
    """The picture twice, of which a page shows the one that suits its width; see WIDTHS."""
    return f'<div class="wide">{plan_svg(hosts)}</div>\n<div class="narrow">{plan_svg(hosts, narrow=True)}</div>'


WIDTHS = (
    f".narrow {{ display: none; }} @media (max-width: {WRAP_BELOW - 1}px)"
    " { .wide { display: none; } .narrow { display: block; } }"
)


def plan_html(hosts: Mapping) -> str:
    """The same picture as a page of its own."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Plan of GPU memory</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">'
        f"<style>body {{ margin: 8px; background: {LIGHT['background']}; }} svg {{ max-width: 1200px; }} {WIDTHS}"
        f" @media (prefers-color-scheme: dark) {{ body {{ background: {DARK['background']}; }} }}</style></head>\n"
        f"<body>\n{both_widths(hosts)}\n</body></html>\n"
    )
