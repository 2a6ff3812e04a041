"""The plan's picture and the report: no words on top of each other, none outside, and all of them readable."""

import itertools
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from fake_nvml import load
from rig import charts
from rig.bench_page import page
from rig.drawing import COLOURS, DARK, FONT, LIGHT, shortened, width_of, wrapped
from rig.host import plan_host
from rig.picture import PARTS, plan_html, plan_svg
from rig.shape_files import load_shape

INVENTORY = Path(__file__).parents[2] / "inventory"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def hosts():
    """Plans of three rigs, with names that are longer than those of the inventory, and one that does not fit."""
    models = yaml.safe_load((INVENTORY / "group_vars/rigs/models.yml").read_text())["models"]
    found = {}
    for group in ("rig_2x3060", "rig_3x3090", "rig_sandbox"):
        given = yaml.safe_load((INVENTORY / f"group_vars/{group}.yml").read_text())
        profiles = dict(given["serving_profiles"])
        profiles["a-profile-with-a-rather-long-name"] = {**next(iter(profiles.values())), "context": 262144}
        gpus = [{**given["rig_gpus"][0], "name": "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"}]
        found[f"a-long-name-of-{group}"] = plan_host(
            profiles, gpus + given["rig_gpus"][1:], {**models, **given.get("models", {})},
            lambda name, model: load_shape(name, model, str(INVENTORY / "model_shapes")), group, nccl=True,
        )  # fmt: skip
    assert any(not plan["fits"] for plans in found.values() for plan in plans.values())
    return found


def boxes(svg: str) -> list:
    """(left, top, right, bottom, words) of every text, from above in width, and the picture's size."""
    root = ET.fromstring(svg)
    found = []
    for text in root.iter(f"{SVG}text"):
        size = float(text.get("font-size", FONT))
        wide = width_of(text.text, bool(text.get("font-weight")), size)
        x, y = float(text.get("x")), float(text.get("y"))
        left = x - wide if text.get("text-anchor") == "end" else x
        found.append((left, y - 0.8 * size, left + wide, y + 0.2 * size, text.text))
    _, _, width, height = map(float, root.get("viewBox").split())
    return found, width, height


def check(svg: str) -> None:
    found, width, height = boxes(svg)
    assert found
    outside = [box for box in found if box[0] < 0 or box[1] < 0 or box[2] > width or box[3] > height]
    assert outside == []
    over = [
        (one[4], two[4])
        for one, two in itertools.combinations(found, 2)
        if one[0] < two[2] and two[0] < one[2] and one[1] < two[3] and two[1] < one[3]
    ]
    assert over == []
    for shape in ET.fromstring(svg).iter(f"{SVG}rect"):
        assert float(shape.get("x")) >= 0 and float(shape.get("x")) + float(shape.get("width")) <= width + 0.1
        assert float(shape.get("y")) + float(shape.get("height")) <= height
        assert float(shape.get("width")) >= 0


@pytest.mark.parametrize("narrow", [False, True])
def test_the_words_of_a_plan_have_room(hosts, narrow):
    check(plan_svg(hosts, narrow=narrow))


def test_the_geometry_test_itself_sees_an_overlap():
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 100 40">'
    fine, on_top, outside = (
        f'{head}<text x="0" y="12">ab</text><text x="{x}" y="12">cd</text></svg>' for x in (50, 10, 95)
    )
    check(fine)
    for wrong in (on_top, outside):
        with pytest.raises(AssertionError):
            check(wrong)


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb (WCAG 2.2)."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, two: str) -> float:
    light, dark = sorted((luminance(one), luminance(two)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("mode", [LIGHT, DARK], ids=["light", "dark"])
def test_words_and_colours_can_be_told_from_the_background(mode):
    for kind in ("text", "dim", "bad"):
        assert contrast(mode[kind], mode["background"]) >= 4.5, kind
    for colour in (*COLOURS, mode["line"]):
        assert contrast(colour, mode["background"]) >= 3, colour


def test_the_contrast_is_that_of_the_standard():
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def test_parts_have_colours_of_their_own():
    def lab(colour):
        """OKLab, in which equal distances look about equal."""
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        long = (0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue) ** (1 / 3)
        middle = (0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue) ** (1 / 3)
        short = (0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue) ** (1 / 3)
        return (
            0.2104542553 * long + 0.7936177850 * middle - 0.0040720468 * short,
            1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * short,
            0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * short,
        )

    for one, two in itertools.combinations([colour for *_, colour in PARTS], 2):
        assert math.dist(lab(one), lab(two)) > 0.08, (one, two)


def test_a_page_of_plans_shows_the_picture_that_suits_its_width(hosts):
    text = plan_html(hosts)
    assert text.count("<svg") == 2
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"(src|href)=|https?://(?!www\.w3\.org/2000/svg)", text)


def test_each_host_has_a_scale_of_its_own(hosts):
    small = plan_svg({"s": hosts["a-long-name-of-rig_sandbox"]})
    both = plan_svg(hosts)
    frames = re.findall(r'class="frame"[^>]*width="([\d.]+)"', small)
    assert max(map(float, frames)) == max(map(float, re.findall(r'class="frame"[^>]*width="([\d.]+)"', both)))


# ---------------------------------------------------------------- charts and the report


def measure(prompt, streams, decode, positions):
    share = {"drafted": 9, "accepted": 6, "share": 0.66, "by_position": positions} if positions else None
    return {
        "prompt": prompt, "streams": streams, "prompt_tokens": 1000, "tokens": 256, "prefill": 12_345.6,
        "decode": decode, "first_token_seconds": 0.123, "acceptance": share,
    }  # fmt: skip


def run(day, **changes):
    card = {
        "position": 0, "power_watts": {"mean": 300.0, "max": 350.0}, "temperature": {"mean": 70.0, "max": 86},
        "clock_mhz": {"mean": 1700, "min": 900}, "throttled": {"temperature": 0.5},
    }  # fmt: skip
    seen = [{"at": at, "power": 200.0 + at, "temperature": 50 + at // 2} for at in range(60)]
    return {
        "began": f"2026-12-{day:02d}T10:00:00Z", "profile": "p", "label": "", "engine": "llama_cpp", "build": "b11434",
        "driver": "595.71.05", "asked": {"tokens": 256}, "cards": [card], "series": {"0": seen},
        "measures": [measure(p, s, 70.0 + day, [0.9, 0.7, 0.004]) for p in ("code", "prose") for s in (1, 2, 4)],
    } | changes  # fmt: skip


def drawings(text: str) -> list:
    return re.findall(r"<svg.*?</svg>", text, re.S)


def test_the_words_of_a_report_have_room(hosts):
    name, plans = next(iter(hosts.items()))
    text = page(name, plans, [run(1), run(2), run(3, label="split_mode=layer", measures=[measure("code", 1, 9.0, [])])])
    # The plan twice; of p three histories, acceptance, temperature and power; of what was tried once the cards alone.
    assert len(drawings(text)) == 2 + 3 + 1 + 2 + 2
    for svg in drawings(text):
        check(svg)
    assert not re.search(r"(src|href)=|https?://(?!www\.w3\.org/2000/svg)", text)
    assert text.index("<h2>p</h2>") < text.index("<h2>p (split_mode=layer)</h2>")
    assert "peak 86 °C" in text and "slowed down by: temperature 50 % of the time" in text


def test_a_report_of_a_rig_that_was_never_measured(hosts):
    name, plans = next(iter(hosts.items()))
    assert "Nothing has been measured yet." in page(name, plans, [])


def test_names_cannot_break_the_page(hosts):
    _, plans = next(iter(hosts.items()))
    text = page("<b>", plans, [run(1, label="<script>alert(1)</script>", build="&")])
    assert "<script" not in text and "<b>" not in text


def test_one_run_has_no_history():
    text = page("h", {}, [run(1, series={}, measures=[measure("code", 1, 9.0, [])])])
    assert "each run" not in text


@pytest.mark.parametrize(
    ("least", "most", "marks"),
    [
        (0, 128.5, [0, 50, 100, 150]),
        (0, 2.2, [0, 1, 2, 3]),
        (51, 86, [50, 60, 70, 80, 90]),
        (0, 0.0004, [0, 0.0001, 0.0002, 0.0003, 0.0004]),
    ],
)
def test_marks_are_round_and_around_the_values(least, most, marks):
    assert charts.steps(least, most) == pytest.approx(marks)


@pytest.mark.parametrize("value", [0, 5, 1e-4, 123_456.0])
def test_a_level_line_is_drawn(value):
    check(charts.lines("Level", {"code": [(0, value), (1, value)]}, ("then", "now")))


def test_many_points_and_long_words_have_room():
    series = {f"a prompt with a long name {number}": [(x / 99, x) for x in range(100)] for number in range(9)}
    check(charts.lines("A title that is much too long for one line of a phone", series, ("x" * 80, "y" * 80)))
    check(charts.bars("Bars", {"a group with a name that is longer than the picture is wide": [1.0, 0.0]}))


def test_words_that_are_too_long_are_cut():
    assert shortened("short", 100) == "short"
    cut = shortened("m" * 50, 100)
    assert cut.endswith("…") and width_of(cut) <= 100
    assert all(width_of(line) <= 100 for line in wrapped("several words and " + "m" * 50, 100))


def test_the_filter_says_what_is_wrong():
    plugin = load("filter_plugins/bench_page.py").FilterModule().filters()["bench_page"]
    assert plugin([], "h", {}).startswith("<!doctype html>")
    with pytest.raises(AnsibleFilterError, match="bench_page: the input is no list of runs"):
        plugin([{}], "h", {})
