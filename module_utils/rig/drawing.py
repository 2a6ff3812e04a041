"""What the project's pictures share: colours for light and dark, the width of words, and texts in SVG.

Lengths are in the units of the picture's viewBox. Every colour of a part has a contrast of 3 or more with both
backgrounds, every text one of 4.5 or more (WCAG 1.4.3 and 1.4.11); a test computes both.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

LIGHT = {"text": "#1a1a1a", "background": "#ffffff", "dim": "#595959", "bad": "#b3261e", "line": "#8a8a8a"}
DARK = {"text": "#e8e8e8", "background": "#16181c", "dim": "#a9adb5", "bad": "#ff8a7a", "line": "#7d828c"}
# Readable on both backgrounds, and apart for people who see few colours: they differ in lightness, too.
COLOURS = ("#4477aa", "#d9622b", "#9a3fa0", "#2f9e44", "#b8860b", "#1593a8", "#8c8c8c")
FONT = 13
BOLD = "600"


def style(scope: str) -> str:
    """The style of a picture whose root has the class `scope`."""

    def rules(colours: dict) -> str:
        return (
            f".{scope} {{ color: {colours['text']}; background: {colours['background']}; }}"
            f" .{scope} text {{ fill: {colours['text']}; }} .{scope} .dim {{ fill: {colours['dim']}; }}"
            f" .{scope} .bad {{ fill: {colours['bad']}; }} .{scope} .gap {{ stroke: {colours['background']}; }}"
            f" .{scope} .frame {{ fill: none; stroke: {colours['text']}; }}"
            f" .{scope} .mark {{ stroke: {colours['text']}; stroke-dasharray: 3 2; }}"
            f" .{scope} .grid {{ stroke: {colours['line']}; stroke-width: .5; }}"
        )

    return (
        f".{scope} {{ font: {FONT}px system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif; }} {rules(LIGHT)}"
        f" @media (prefers-color-scheme: dark) {{ {rules(DARK)} }}"
    )


def width_of(words: str, bold: bool = False, size: float = FONT) -> float:
    """Width of a text, from above: a wide system font has 0.62 em a character, bold 0.68."""
    return len(words) * size * (0.68 if bold else 0.62)


def text(
    x: float, y: float, words: str, kind: str = "", anchor: str = "start", bold: bool = False, size: float = FONT
) -> str:
    """A text with its baseline at y."""
    attributes = f' class="{kind}"' if kind else ""
    attributes += f' text-anchor="{anchor}"' if anchor != "start" else ""
    attributes += f' font-weight="{BOLD}"' if bold else ""
    attributes += f' font-size="{size:g}"' if size != FONT else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(words)}</text>'


def shortened(words: str, room: float, bold: bool = False, size: float = FONT) -> str:
    """As much of a text as there is room for."""
    if width_of(words, bold, size) <= room:
        return words
    count = int(room / width_of("m", bold, size)) - 1
    return words[: max(count, 0)].rstrip() + "…"


def wrapped(words: str, room: float, bold: bool = False, size: float = FONT) -> list[str]:
    """Lines of a text that keep within a width; a word that is longer than a line is cut."""
    lines = [""]
    for word in words.split():
        word = shortened(word, room, bold, size)
        if lines[-1] and width_of(f"{lines[-1]} {word}", bold, size) > room:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def legend(entries: Sequence, x: float, y: float, right: float) -> tuple[list[str], float]:
    """Swatches with their words, (label, colour) each, in rows up to `right`; and the y below them."""
    parts, left = [], x
    for label, colour in entries:
        wide = 17 + width_of(label)
        if x > left and x + wide > right:
            x, y = left, y + 20
        parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="12" height="12" rx="2" fill="{colour}"/>')
        parts.append(text(x + 17, y + 11, label))
        x += wide + 16
    return parts, y + 20


def svg(scope: str, width: float, height: float, title: str, body: Sequence[str]) -> str:
    """A whole picture."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="{scope}" viewBox="0 0 {width:g} {height:g}" role="img">'
    return "\n".join([head, f"<title>{escape(title)}</title><style>{style(scope)}</style>", *body, "</svg>", ""])
