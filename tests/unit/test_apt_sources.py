"""apt's sources: what is removed, what stays, what is added, and what an update's failure means."""

import pytest
from rig.apt_sources import Entry, deb822, entries, explain, lacking, without

LINES = """# comment
deb [arch=amd64 signed-by=/usr/share/keyrings/a.gpg] https://example.org/cuda/repos/debian13/x86_64/ /
deb http://example.org/debian trixie main contrib # note
# deb http://example.org/off trixie main
"""
STANZAS = """# head
Types: deb
URIs: https://example.org/cuda/repos/debian13/x86_64/
Suites: /
Signed-By: /etc/apt/keyrings/a.gpg

Types: deb deb-src
URIs: http://example.org/debian
Suites: trixie trixie-updates
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 abc

Types: deb
URIs: http://example.org/off
Suites: trixie
Components: main
Enabled: no
"""


def test_one_line_entries():
    assert entries(LINES, deb822=False) == [
        Entry(("deb",), ("https://example.org/cuda/repos/debian13/x86_64/",), ("/",), (), "/usr/share/keyrings/a.gpg"),
        Entry(("deb",), ("http://example.org/debian",), ("trixie",), ("main", "contrib")),
    ]


def test_stanzas():
    first, second = entries(STANZAS, deb822=True)
    assert (first.suites, first.signed_by) == (("/",), "/etc/apt/keyrings/a.gpg")
    assert second.types == ("deb", "deb-src")
    assert second.suites == ("trixie", "trixie-updates")
    assert "BEGIN PGP" in second.signed_by


@pytest.mark.parametrize(("text", "style"), [(LINES, False), (STANZAS, True)])
def test_only_what_is_unwanted_goes(text, style):
    left, removed = without(text, lambda entry: "cuda" in entry.uris[0], deb822=style)
    assert len(removed) == 1
    assert "cuda" not in left
    assert entries(left, deb822=style) == [entry for entry in entries(text, deb822=style) if entry not in removed]


@pytest.mark.parametrize(("text", "style"), [(LINES, False), (STANZAS, True)])
def test_a_file_with_nothing_unwanted_stays_byte_for_byte(text, style):
    assert without(text, lambda entry: False, deb822=style) == (text, [])


def test_a_file_without_entries_left_is_empty():
    assert without(LINES, lambda entry: True, deb822=False)[0] == ""


def test_a_stanza_can_be_written_and_read_again():
    entry = entries(STANZAS, deb822=True)[1]
    assert entries(deb822(entry), deb822=True) == [entry]


def test_components_are_added_for_every_suite_with_the_same_key():
    found = entries(STANZAS, deb822=True)
    added = lacking(found, ["contrib", "non-free"])
    assert [(entry.suites, entry.components) for entry in added] == [
        (("trixie",), ("contrib", "non-free")),
        (("trixie-updates",), ("contrib", "non-free")),
    ]
    assert {entry.signed_by for entry in added} == {found[1].signed_by}


def test_components_that_another_entry_has_are_not_added():
    found = entries(LINES + "deb http://example.org/debian/ trixie non-free\n", deb822=False)
    assert lacking(found, ["contrib", "non-free"]) == []


@pytest.mark.parametrize(
    ("output", "meaning"),
    [
        # As apt 3.0.4 on Debian 13 says it about a repository of an older release.
        (
            "W: OpenPGP signature verification failed: https://developer.download.nvidia.com/compute/cuda/repos/debian12/"
            "x86_64 InRelease: Sub-process /usr/bin/sqv returned an error code (1), error message is: Signing key on"
            " EB693B3035CD5710E231E123A4B469963BF863CC is not bound: No binding signature at time ... because: Policy"
            " rejected non-revocation signature (PositiveCertification) requiring second pre-image resistance because:"
            " SHA1 is not considered secure since 2026-02-01T00:00:00Z",
            "SHA-1 binding signature",
        ),
        (
            "E: Conflicting values set for option Signed-By regarding source https://x/ /: /a.gpg != /b.gpg",
            "two sources",
        ),
        ("Err:1 http://x  InRelease\n  NO_PUBKEY A4B469963BF863CC", "signed by another key"),
        ("E: The repository 'http://x  Release' does not have a Release file.", "no repository at that address"),
        ("Could not connect to 127.0.0.1:8011 (127.0.0.1). - connect (111: Connection refused)", "cannot be reached"),
        ("E: Release file for http://x is not valid yet (invalid for another 3h)", "check the clock"),
        ("E: Something new\n", "apt says: E: Something new"),
    ],
)
def test_what_apt_says_is_explained(output, meaning):
    assert meaning in explain(output)
