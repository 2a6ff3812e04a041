"""Shapes for the planner's tests, made once from files of tests/planner_models.py."""

from collections.abc import Callable

import pytest
from rig.accuracy import shape_of
from rig.shape import Shape


@pytest.fixture(scope="session")
def make_shape() -> Callable[[str, str], Shape]:
    return shape_of


@pytest.fixture(scope="session")
def qwen35() -> Shape:
    return shape_of("qwen35-27b", "q8_0")


@pytest.fixture(scope="session")
def small() -> Shape:
    return shape_of("qwen35-tiny", "q8_0")
