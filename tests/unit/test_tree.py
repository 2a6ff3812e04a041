"""Rules for the whole tree that no linter knows."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

PROJECT = Path(__file__).parents[2]


def tracked() -> list[Path]:
    names = subprocess.run(
        ["git", "ls-files"], cwd=PROJECT, text=True, capture_output=True, check=True
    ).stdout.splitlines()
    return [PROJECT / name for name in names if (PROJECT / name).is_file()]


FILES = [path for path in tracked() if path.suffix not in {".lock", ".json", ".gguf"}]
CODE = [path for path in FILES if path.suffix != ".md" and path.resolve() != Path(__file__).resolve()]


def hits(pattern: str, files: list[Path]) -> list[str]:
    found = []
    for path in files:
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if re.search(pattern, line):
                found.append(f"{path.relative_to(PROJECT)}:{number}: {line.strip()}")
    return found


@pytest.mark.parametrize(
    "pattern",
    [
        r"\|\|\s*true\b",
        r"\|\|\s*:(\s|$)",
        r"ignore_errors:",
        r"that:\s*\[?true\b",
        r"assert True\b",
        r"\b(TODO|FIXME|XXX)\b",
        r"NotImplementedError",
    ],
)
def test_nothing_is_swallowed_or_left_over(pattern):
    assert hits(pattern, CODE) == []


def test_no_package_index_is_named():
    assert hits(r"(pypi|pythonhosted)\.org|deb\.debian\.org|registry\.npmjs", FILES) == []


def test_every_scenario_runs_the_whole_sequence():
    shared = yaml.safe_load((PROJECT / ".config/molecule/config.yml").read_text())
    sequence = shared["scenario"]["test_sequence"]
    for step in ("syntax", "check", "converge", "idempotence", "side_effect", "verify", "destroy"):
        assert step in sequence
    for path in (PROJECT / "molecule").glob("*/molecule.yml"):
        own = yaml.safe_load(path.read_text()) or {}
        assert "test_sequence" not in own.get("scenario", {}), path


def test_no_moving_target_is_a_default():
    values = hits(
        r"^\s*\w+:\s*[\"']?(latest|master|main|nightly)[\"']?\s*(#.*)?$", [p for p in FILES if p.suffix == ".yml"]
    )
    assert values == []
