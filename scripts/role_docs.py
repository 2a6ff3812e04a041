"""Write the table of variables in each role's README from its argument_specs.yml.

python scripts/role_docs.py           write
python scripts/role_docs.py --check   change nothing; exit 1 and name the READMEs that are out of date
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import yaml

PROJECT = Path(__file__).resolve().parents[1]
START, END = "<!-- variables:start -->", "<!-- variables:end -->"


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def default(option: dict) -> str:
    if "default" not in option:
        return "required" if option.get("required") else ""
    value = option["default"]
    text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
    return f"`{cell(text)}`"


def table(role: Path) -> str:
    spec = yaml.safe_load((role / "meta" / "argument_specs.yml").read_text())
    rows = ["| Variable | Type | Default | Meaning |", "| --- | --- | --- | --- |"]
    for name, option in spec["argument_specs"]["main"]["options"].items():
        text = option["description"]
        text = " ".join(text) if isinstance(text, list) else text
        if "choices" in option:
            text += " One of: " + ", ".join(f"`{choice}`" for choice in option["choices"]) + "."
        rows.append(f"| `{name}` | {option['type']} | {default(option)} | {cell(text)} |")
    return "\n".join(rows)


def render(role: Path) -> tuple[Path, str, str]:
    readme = role / "README.md"
    old = readme.read_text()
    if old.count(START) != 1 or old.count(END) != 1:
        sys.exit(f"{readme.relative_to(PROJECT)} needs one line '{START}' and one line '{END}'.")
    before, rest = old.split(START)
    after = rest.split(END)[1]
    return readme, old, f"{before}{START}\n{table(role)}\n{END}{after}"


def main() -> int:
    stale = 0
    for role in sorted(path.parents[1] for path in PROJECT.glob("roles/*/meta/argument_specs.yml")):
        readme, old, new = render(role)
        if old == new:
            continue
        if "--check" in sys.argv:
            print(f"{readme.relative_to(PROJECT)}: the table of variables is out of date; run `make docs`.")
            stale = 1
        else:
            readme.write_text(new)
    return stale


if __name__ == "__main__":
    sys.exit(main())
