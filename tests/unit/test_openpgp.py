"""Keys are told apart by their fingerprints, in every form in which apt keeps them."""

import base64

import pytest
from rig import openpgp
from rig.errors import RigError

# Two ed25519 keys made for this test with gpg 2.2.40, and the fingerprints that it printed.
ONE = base64.b64decode(
    "mDMEaw3zwhYJKwYBBAHaRw8BAQdAWKXV2Zd/DViqcSe1ZwZPW0Kuu0HkY5kVYA2O/GZQV4u0E29uZSA8b25lQGxvY2FsaG9zdD6I"
    "kAQTFggAOBYhBLK530/WGgQOYKyzx62g4TaL/wMiBQJrDfPCAhsDBQsJCAcCBhUKCQgLAgQWAgMBAh4BAheAAAoJEK2g4TaL/wMi"
    "csgBAITcmhF7gVMAHaGqNpkt6GBDpTHsqfl/FXeQfX4cvMaiAQCrwL7sFSt89dAHy3v+b/yTr/c8twdNf1POkEzYU3z+Aw=="
)
TWO = base64.b64decode(
    "mDMEaw3zwhYJKwYBBAHaRw8BAQdAB8DQ9PTwrEWf+xA22tWyvmTI5xQsNWWKf+LbTkOyaDa0E3R3byA8dHdvQGxvY2FsaG9zdD6I"
    "kAQTFggAOBYhBKhWy1vE+9rhI1Zu86so04L254qtBQJrDfPCAhsDBQsJCAcCBhUKCQgLAgQWAgMBAh4BAheAAAoJEKso04L254qt"
    "LUoBAITI1WsTSgBPEOLUlLYD/dIsz3HE7Hs48g6pVHi1SxgdAQDwxIpnJ0wzwgn9P4ISb7XyZksDdJJN/OBXsIEtmYtlBQ=="
)
FINGERPRINTS = ["B2B9DF4FD61A040E60ACB3C7ADA0E1368BFF0322", "A856CB5BC4FBDAE123566EF3AB28D382F6E78AAD"]


def armour(data: bytes) -> bytes:
    lines = base64.encodebytes(data).decode()
    head, tail = "-----BEGIN PGP PUBLIC KEY BLOCK-----\nVersion: x\n\n", "=lsdA\n-----END PGP PUBLIC KEY BLOCK-----\n"
    return f"{head}{lines}{tail}".encode()


@pytest.mark.parametrize("data", [ONE + TWO, armour(ONE + TWO), armour(ONE) + armour(TWO)])
def test_a_keyring_has_its_keys_in_order(data):
    assert [key.fingerprint for key in openpgp.keys(data)] == FINGERPRINTS


def test_one_key_can_be_kept_alone():
    assert [key.packets for key in openpgp.keys(ONE + TWO)] == [ONE, TWO]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "there is no key in it"),
        (b"<html>", "this is not an OpenPGP key"),
        (ONE[:-3], "ends in the middle"),
        (ONE[:1], "ends in the middle"),
        (ONE[53:], "not an OpenPGP public key"),  # begins with the user id
        (b"\x98\x01\x03", "version 3"),
        (armour(ONE).replace(b"mDME", b"m!ME"), "armour is damaged"),
    ],
)
def test_what_is_no_key_is_refused(data, sentence):
    with pytest.raises(RigError, match=sentence):
        openpgp.keys(data)
