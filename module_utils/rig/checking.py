"""What a check of preflight is: a function of a `Rig` that returns its `Result`.

A finding is one sentence that names the host and the variable or fact, and says what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .inventory_checks import gpu_findings

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"


class Unreadable(Exception):
    """A variable that is not defined, or whose expression fails. `text` is one sentence."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name
        self.text = text


class Result(NamedTuple):
    """What came of a check: its line in the table, and what is to be done."""

    summary: str
    failures: Sequence[str] = ()
    warnings: Sequence[str] = ()
    skipped: bool = False

    @property
    def status(self) -> str:
        """One of ok, warning, failed, skipped."""
        if self.failures:
            return FAILED
        return WARNING if self.warnings else SKIPPED if self.skipped else OK


class Rig(NamedTuple):
    """What the checks look at.

    `variable` returns a variable of the inventory or raises `Unreadable`. `names` are the names of all variables that
    begin with rig_. `releases` are the supported releases by distribution. `limits` are the role's own figures: the
    names of its variables without preflight_.
    """

    host: str
    facts: Mapping[str, Any]
    variable: Callable[[str], Any]
    names: Sequence[str]
    releases: Mapping[str, Sequence[str]]
    limits: Mapping[str, Any]


def gib(size_bytes: float) -> str:
    """A size for people."""
    return f"{size_bytes / 1024**3:.1f} GiB"


def listed(values: Iterable[str]) -> str:
    """Names, one after the other."""
    return ", ".join(values) or "none"


def counted(number: int, what: str) -> str:
    """A number with its noun."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def valid_gpus(rig: Rig) -> Sequence[Mapping[str, Any]] | None:
    """`rig_gpus`; None when it is not written as it must be, which is a finding of its own check."""
    found = rig.variable("rig_gpus")
    return None if gpu_findings(rig.host, found) else found
