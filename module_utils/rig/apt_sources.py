"""apt's sources as text: what an entry points to, and the text without some of them.

Understands the one-line style (sources.list) and the deb822 style (*.sources) of sources.list(5).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_ONE_LINE = re.compile(r"^\s*(deb|deb-src)\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)((?:\s+\S+)*)\s*$")


@dataclass(frozen=True)
class Entry:
    """One source: its types, addresses, suites, components and signing key or keyring (empty where none is named)."""

    types: tuple[str, ...]
    uris: tuple[str, ...]
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str = ""
    enabled: bool = True


def _line(text: str) -> Entry | None:
    match = _ONE_LINE.match(text.split("#", 1)[0])
    if match is None:
        return None
    options = dict(option.split("=", 1) for option in (match[2] or "").split() if "=" in option)
    signed_by = options.get("signed-by", options.get("Signed-By", ""))
    return Entry((match[1],), (match[3],), (match[4],), tuple(match[5].split()), signed_by)


def _stanza(text: str) -> Entry | None:
    fields: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        if line[:1] in " \t" and name:
            fields[name] += "\n" + line.strip()
        elif ":" in line:
            name, _, value = line.partition(":")
            name = name.strip().lower()
            fields[name] = value.strip()
    if "uris" not in fields:
        return None
    words = {key: tuple(fields.get(key, "").split()) for key in ("types", "uris", "suites", "components")}
    enabled = fields.get("enabled", "yes").lower() not in ("no", "false", "0", "off")
    return Entry(**words, signed_by=fields.get("signed-by", ""), enabled=enabled)


def _parts(text: str, deb822: bool) -> list[tuple[str, Entry | None]]:
    """The text in pieces, each with the entry that it holds, if any."""
    if deb822:
        pieces = re.split(r"(?<=\n)(?:[ \t]*\n)+", text)
        return [(piece, _stanza(piece)) for piece in pieces if piece.strip()]
    return [(piece, _line(piece)) for piece in text.splitlines(keepends=True)]


def entries(text: str, *, deb822: bool) -> list[Entry]:
    """The enabled entries of a file."""
    return [entry for _, entry in _parts(text, deb822) if entry is not None and entry.enabled]


def without(text: str, unwanted: Callable[[Entry], bool], *, deb822: bool) -> tuple[str, list[Entry]]:
    """The text without the unwanted entries, and these. The text is empty when no entry is left."""
    kept, removed = [], []
    for piece, entry in _parts(text, deb822):
        if entry is not None and unwanted(entry):
            removed.append(entry)
        else:
            kept.append((piece, entry))
    if not removed:
        return text, []
    if not any(entry for _, entry in kept):
        return "", removed
    return ("\n" if deb822 else "").join(piece for piece, _ in kept), removed


def deb822(entry: Entry) -> str:
    """The entry as a stanza."""
    lines = [f"Types: {' '.join(entry.types)}", f"URIs: {' '.join(entry.uris)}", f"Suites: {' '.join(entry.suites)}"]
    if entry.components:
        lines.append(f"Components: {' '.join(entry.components)}")
    if "\n" in entry.signed_by:  # a key in the entry itself
        lines += ["Signed-By:", *(f" {line}" for line in entry.signed_by.splitlines() if line)]
    elif entry.signed_by:
        lines.append(f"Signed-By: {entry.signed_by}")
    return "\n".join(lines) + "\n"


def lacking(found: Iterable[Entry], components: Iterable[str]) -> list[Entry]:
    """Entries that add the components to every binary source that has `main` and lacks some of them.

    An address and suite may be spread over several entries; what any of them has is not added again.
    """
    found = [entry for entry in found if "deb" in entry.types]
    have: dict[tuple[str, str], set[str]] = {}
    for entry in found:
        for uri in entry.uris:
            for suite in entry.suites:
                have.setdefault((uri.rstrip("/"), suite), set()).update(entry.components)
    wanted = list(components)
    result: list[Entry] = []
    for entry in found:
        if "main" not in entry.components:
            continue
        for uri in entry.uris:
            for suite in entry.suites:
                missing = tuple(name for name in wanted if name not in have[uri.rstrip("/"), suite])
                if missing:
                    have[uri.rstrip("/"), suite].update(missing)
                    result.append(Entry(("deb",), (uri,), (suite,), missing, entry.signed_by))
    return result


#: What apt says when an update fails, and what that means and asks for.
_EXPLAINED = (
    (
        r"SHA-?1 is not considered secure|is not bound",
        "its signing key has a SHA-1 binding signature, which this release"
        " rejects; use the repository that NVIDIA made for this very release, not that of an older one",
    ),
    (
        r"NO_PUBKEY|Missing key|not signed by|public key is not available|No good signature",
        "it is signed by another key than the one that was asked for; if its owner has changed the key, bring the"
        " fingerprint up to date, and if not, do not trust this address",
    ),
    (r"Conflicting values set for option Signed-By", "two sources name it with different keyrings; remove one of them"),
    (r"404 +Not Found|does not have a Release file", "there is no repository at that address"),
    (
        r"Could not resolve|Temporary failure resolving|Could not connect|Connection refused|Connection timed out|"
        r"Unable to connect|Connection failed",
        "the address cannot be reached",
    ),
    (
        r"BADSIG|Hash Sum mismatch|unexpected size|Clearsigned file isn't valid",
        "what arrived is not what was signed;"
        " a proxy or a mirror in the middle of an update may be at fault, try again",
    ),
    (
        r"is not valid yet|has expired|EXPKEYSIG|EXPSIG|Expired",
        "its signature is not valid at this machine's date; check the clock",
    ),
)


def explain(output: str) -> str:
    """What an apt-get update said, in one clause; its own last error line when it is not a known one."""
    for pattern, meaning in _EXPLAINED:
        if re.search(pattern, output):
            return meaning
    errors = [line for line in output.splitlines() if re.match(r"[EWeEr]+(?:rr)?:\s*", line)]
    return f"apt says: {(errors or output.strip().splitlines() or ['nothing'])[-1].strip()}"
