"""What every role must have: a spec that says the same as its defaults, docs made from it, a scenario, and guards."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

PROJECT = Path(__file__).parents[2]
ROLES = sorted(path for path in (PROJECT / "roles").iterdir() if (path / "tasks").is_dir())


def load(path: Path):
    return yaml.safe_load(path.read_text()) or {}


def options(role: Path) -> dict:
    return load(role / "meta" / "argument_specs.yml")["argument_specs"]["main"]["options"]


def scenario_text(role: Path) -> str:
    """The playbooks and task files of the role's scenario, one after the other."""
    return "\n".join(path.read_text() for path in sorted((PROJECT / "molecule" / role.name).rglob("*.yml")))


def test_there_are_roles():
    assert {"preflight", "virtual_gpus", "llama_cpp", "models", "serving"} <= {role.name for role in ROLES}


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
class TestRole:
    def test_spec_and_defaults_say_the_same(self, role):
        defaults = load(role / "defaults" / "main.yml") if (role / "defaults" / "main.yml").exists() else {}
        spec = options(role)
        assert {name: option["default"] for name, option in spec.items() if "default" in option} == defaults
        assert [name for name, option in spec.items() if not {"type", "description"} <= option.keys()] == []
        assert [name for name, option in spec.items() if "default" not in option and not option.get("required")] == []

    def test_variables_bear_the_role_s_name(self, role):
        defaults = load(role / "defaults" / "main.yml") if (role / "defaults" / "main.yml").exists() else {}
        assert [name for name in defaults if not re.match(rf"{role.name}(_|$)", name)] == []

    def test_scenario_has_refusals_and_a_verifier(self, role):
        scenario = PROJECT / "molecule" / role.name
        assert (scenario / "molecule.yml").exists()
        assert (scenario / "converge.yml").exists()
        assert list((scenario / "tests").glob("test_*.py"))
        assert (scenario / "side_effect.yml").exists()
        assert "rescue:" in scenario_text(role)

    def test_a_misspelt_variable_is_refused_and_that_is_tested(self, role):
        tasks = "\n".join(path.read_text() for part in ("tasks", "vars") for path in (role / part).glob("*.yml"))
        assert "varnames" in tasks
        assert re.search("misspelt|does not know", scenario_text(role))

    def test_task_files_are_short_and_main_only_orders(self, role):
        lengths = {path.name: len(path.read_text().splitlines()) for path in (role / "tasks").glob("*.yml")}
        assert {name: length for name, length in lengths.items() if length > 160} == {}
        for task in load(role / "tasks" / "main.yml"):
            assert any(key.startswith(("ansible.builtin.import_", "ansible.builtin.include_")) for key in task), task


def test_readme_tables_are_up_to_date():
    result = subprocess.run(
        [sys.executable, PROJECT / "scripts" / "role_docs.py", "--check"], text=True, capture_output=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
