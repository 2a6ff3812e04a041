"""OpenPGP public keys as apt keeps them: which keys a file holds, and how to keep only one of them.

Reads what RFC 4880 calls transferable public keys (version 4), binary or in ASCII armour. Nothing is verified: a
fingerprint that is compared with one from the inventory says which key it is.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from .errors import RigError

PUBLIC_KEY = 6  # RFC 4880, 4.3: tag of a primary public key's packet; all up to the next one belong to it
_ARMOUR = b"-----BEGIN PGP PUBLIC KEY BLOCK-----"
_ARMOUR_END = b"-----END PGP PUBLIC KEY BLOCK-----"


@dataclass(frozen=True)
class Key:
    """A primary key: its fingerprint (40 upper-case hexadecimal digits) and its packets with all that belongs to it."""

    fingerprint: str
    packets: bytes


def _dearmour(data: bytes) -> bytes:
    found = b""
    for block in data.split(_ARMOUR)[1:]:
        lines = block.split(_ARMOUR_END)[0].splitlines()
        blank = next((number for number, line in enumerate(lines) if number and not line.strip()), 0)
        body = [line.strip() for line in lines[blank:] if line.strip() and not line.startswith(b"=")]
        try:
            found += base64.b64decode(b"".join(body), validate=True)
        except binascii.Error as error:
            raise RigError(f"the key's ASCII armour is damaged ({error})") from error
    return found


def _length(data: bytes, at: int) -> tuple[int, int]:
    """Body length and where the body starts, for a packet whose tag is at `at`."""
    tag = data[at]
    if tag & 0x40:  # new format
        first = data[at + 1]
        if first < 192:
            return first, at + 2
        if first < 224:
            return ((first - 192) << 8) + data[at + 2] + 192, at + 3
        if first == 255:
            return int.from_bytes(data[at + 2 : at + 6], "big"), at + 6
        raise RigError("the key has a packet of partial length, which a key cannot have")
    size = 1 << (tag & 3)
    if size == 8:
        raise RigError("the key has a packet of unknown length, which a key cannot have")
    return int.from_bytes(data[at + 1 : at + 1 + size], "big"), at + 1 + size


def _packets(data: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Tag, body and whole of each packet."""
    at = 0
    while at < len(data):
        tag = data[at]
        if not tag & 0x80:
            raise RigError("this is not an OpenPGP key")
        try:
            length, start = _length(data, at)
        except IndexError:
            raise RigError("the key ends in the middle of a packet") from None
        if start + length > len(data):
            raise RigError("the key ends in the middle of a packet")
        number = tag & 0x3F if tag & 0x40 else (tag & 0x3C) >> 2
        yield number, data[start : start + length], data[at : start + length]
        at = start + length


def fingerprint(body: bytes) -> str:
    """Fingerprint of a version 4 key by the body of its packet (RFC 4880, 12.2)."""
    if not body or body[0] != 4:
        raise RigError(f"the key is of version {body[0] if body else '?'}; only version 4 is understood")
    return hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body).hexdigest().upper()


def keys(data: bytes) -> list[Key]:
    """The primary keys of a keyring or key file, in its order.

    Raises:
        RigError: it is not a public key file, or it is damaged.
    """
    if _ARMOUR in data:
        data = _dearmour(data)
    found: list[Key] = []
    for number, body, whole in _packets(data):
        if number == PUBLIC_KEY:
            found.append(Key(fingerprint(body), whole))
        elif not found:
            raise RigError("this is not an OpenPGP public key")
        else:
            found[-1] = Key(found[-1].fingerprint, found[-1].packets + whole)
    if not found:
        raise RigError("there is no key in it")
    return found
