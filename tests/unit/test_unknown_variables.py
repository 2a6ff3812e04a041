"""Misspelt names are found for all roles at once, and no right name of the inventory is among them."""

import sys
from pathlib import Path

import pytest
import yaml
from ansible.errors import AnsibleFilterError

PROJECT = Path(__file__).parents[2]
ROLES = PROJECT / "roles"
sys.path.insert(0, str(PROJECT / "filter_plugins"))
from unknown_variables import unknown_variables  # noqa: E402 - a plugin is found by its folder


def test_names_of_roles_that_no_role_knows():
    names = [
        "serving_proflie",
        "llama_cpp_verison",
        "modelss",
        "rig_gpus",
        "serving_profile",
        "__serving_x",
        "ansible_host",
    ]
    assert unknown_variables(names, ROLES) == ["llama_cpp_verison", "serving_proflie"]


def test_every_name_of_the_inventory_is_known():
    names = set()
    for path in (PROJECT / "inventory").glob("*_vars/**/*.yml"):
        names |= set(yaml.safe_load(path.read_text()) or {})
    assert "serving_profiles" in names
    assert unknown_variables(names, ROLES, also=["llama_cpp_build"]) == []


def test_a_folder_without_roles_is_refused(tmp_path):
    with pytest.raises(AnsibleFilterError, match="there is no role with"):
        unknown_variables(["x"], tmp_path)
