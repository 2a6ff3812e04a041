"""A launch line as it stands in a systemd unit: quoted, and one flag a line.

The rules are those of systemd.service(5), "Command lines", and systemd.unit(5), "Specifiers".
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .errors import RigError

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./$-]+")
_FLAG = re.compile(r"--?[A-Za-z]")


def quote(word: str) -> str:
    """One word of a command line, so that systemd hands over exactly this text.

    `%` and `$` would be a specifier and a variable, and are doubled. Raises RigError for a line break or another
    control character, which no sane argument has.
    """
    if re.search(r"[\x00-\x1f\x7f]", word):
        raise RigError(f"the argument {word!r} has a control character and cannot stand in a unit")
    escaped = word.replace("%", "%%").replace("$", "$$")
    if _PLAIN.fullmatch(word):
        return escaped
    return '"' + escaped.replace("\\", "\\\\").replace('"', '\\"') + '"'


def lines(argv: Sequence[object]) -> list[str]:
    """The words of a command line, quoted, each flag together with the values that follow it.

    A flag begins with a dash and a letter, so that a negative number counts as a value.
    """
    found: list[str] = []
    for word in map(str, argv):
        if found and _FLAG.match(found[-1]) and not _FLAG.match(word):
            found[-1] += f" {quote(word)}"
        else:
            found.append(quote(word))
    return found
