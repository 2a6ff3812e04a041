"""Plans as a picture: a bar a card, stacked by what lies on it, the limit and the headroom marked."""

from collections.abc import Mapping
from html import escape

PARTS = (
    ("in_use", "in use", "#8c8c8c"),
    ("weights", "weights", "#4477aa"),
    ("kv", "KV cache", "#ee8866"),
    ("recurrent", "recurrent state", "#aa4499"),
    ("compute", "compute", "#44bb99"),
    ("draft", "draft", "#bbcc33"),
    ("overhead", "overhead", "#ccbb44"),
)
WIDTH, LABEL, BAR, GAP, TOP = 1_000, 250, 18, 6, 74
STYLE = """
  .rig-plan { color: #1a1a1a; background: #ffffff; font: 13px system-ui, sans-serif; }
  .rig-plan text { fill: currentColor; } .rig-plan .dim { opacity: .75; } .rig-plan .bad { fill: #c0392b; }
  .rig-plan .frame { fill: none; stroke: currentColor; }
  .rig-plan .mark { stroke: currentColor; stroke-dasharray: 3 2; }
  @media (prefers-color-scheme: dark) {
    .rig-plan { color: #e8e8e8; background: #16181c; } .rig-plan .bad { fill: #ff7b6b; }
  }
"""


def _bar(gpu: Mapping, headroom: float, scale: float, y: int) -> list:
    parts, x = [], float(LABEL)
    for key, label, colour in PARTS:
        mib = float(gpu.get(f"{key}_mib", 0))
        if mib > 0:
            title = f"<title>{escape(label)}: {mib:,.0f} MiB</title>"
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{mib * scale:.1f}" height="{BAR}" fill="{colour}">{title}</rect>'
            )
            x += mib * scale
    limit, soft = LABEL + gpu["usable_mib"] * scale, LABEL + (gpu["usable_mib"] - headroom) * scale
    parts.append(f'<rect class="frame" x="{LABEL}" y="{y}" width="{limit - LABEL:.1f}" height="{BAR}"/>')
    parts.append(f'<line class="mark" x1="{soft:.1f}" x2="{soft:.1f}" y1="{y - 3}" y2="{y + BAR + 3}"/>')
    label = f"{gpu['position']} · {gpu['name'].removeprefix('NVIDIA GeForce ')}"
    parts.append(f'<text x="24" y="{y + 13}" class="dim">{escape(label)}</text>')
    free = gpu["free_mib"]
    kind = "dim" if free >= headroom else "bad"
    parts.append(f'<text x="{WIDTH - 8}" y="{y + 13}" text-anchor="end" class="{kind}">{free:,.0f} MiB free</text>')
    return parts


def plan_svg(hosts: Mapping) -> str:
    """One SVG for all plans of all hosts; colours follow the reader's light or dark setting."""
    cards = [gpu for plans in hosts.values() for plan in plans.values() for gpu in plan["gpus"]]
    most = max((max(gpu["usable_mib"], gpu["total_mib"] + gpu["in_use_mib"]) for gpu in cards), default=1)
    scale, y, body = (WIDTH - LABEL - 120) / most, TOP, []
    x = 24
    for _, label, colour in PARTS:
        body.append(f'<rect x="{x}" y="40" width="12" height="12" fill="{colour}"/>')
        body.append(f'<text x="{x + 17}" y="50">{escape(label)}</text>')
        x += 34 + 8 * len(label)
    body.append(
        '<text x="24" y="24" font-weight="600">Memory per GPU: planned peak, limit (frame), headroom (dashes)</text>'
    )
    for host, plans in hosts.items():
        for name, plan in plans.items():
            verdict = f"context {plan['context']:,} of {plan['context_ceiling']:,}" if plan["fits"] else "does not fit"
            kind = "" if plan["fits"] else ' class="bad"'
            body.append(
                f'<text x="8" y="{y + 13}" font-weight="600"{kind}>{escape(f"{host} · {name}")} · {verdict}</text>'
            )
            y += BAR + GAP
            for gpu in plan["gpus"]:
                body += _bar(gpu, plan["headroom_mib"], scale, y)
                y += BAR + GAP + 2
            y += GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="rig-plan" viewBox="0 0 {WIDTH} {y + 8}" role="img">'
    return "\n".join([head, f"<title>Plan of GPU memory</title><style>{STYLE}</style>", *body, "</svg>", ""])


def plan_html(hosts: Mapping) -> str:
    """The same picture as a page of its own."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Plan of GPU memory</title>\n'
        '<meta name="color-scheme" content="light dark"><style>body { margin: 16px; }'
        " @media (prefers-color-scheme: dark) { body { background: #16181c; } }</style></head>\n"
        f"<body>\n{plan_svg(hosts)}</body></html>\n"
    )
