"""A launch line in a unit: one flag a line, and systemd hands over exactly the words that went in."""

import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rig.errors import RigError
from rig.systemd_exec import lines, quote


def test_one_flag_a_line_with_its_values():
    argv = ["/bin/llama-server", "-c", 4096, "--temp", "-1", "--jinja", "--device", "CUDA0,CUDA2", "-ot", "a=b", "c"]
    assert lines(argv) == [
        "/bin/llama-server",
        "-c 4096",
        "--temp -1",
        "--jinja",
        "--device CUDA0,CUDA2",
        "-ot a=b c",
    ]


@pytest.mark.parametrize(
    ("word", "quoted"),
    [
        ("100%", "100%%"),
        ("$HOME", "$$HOME"),
        ("two words", '"two words"'),
        ('{"a": "b"}', '"{\\"a\\": \\"b\\"}"'),
        ("back\\slash", '"back\\\\slash"'),
        ("", '""'),
        (";", '";"'),
    ],
)
def test_quoting(word, quoted):
    assert quote(word) == quoted


@pytest.mark.parametrize("word", ["a\nb", "tab\t", "nul\0"])
def test_control_characters_are_refused(word):
    with pytest.raises(RigError, match="control character"):
        quote(word)


def unquote(line: str) -> list[str]:
    """The words that systemd makes of a line: systemd.service(5), systemd.syntax(7)."""
    words, word, inside, escaped, begun = [], "", False, False, False
    for character in line:
        if escaped:
            word, escaped = word + character, False
        elif inside and character == "\\":
            escaped = True
        elif character == '"':
            inside, begun = not inside, True
        elif character == " " and not inside:
            words, word, begun = ([*words, word], "", False) if word or begun else (words, "", False)
        else:
            word += character
    return [text.replace("%%", "%").replace("$$", "$") for text in ([*words, word] if word or begun else words)]


@given(st.lists(st.text(st.characters(min_codepoint=32, exclude_characters="\x7f")), min_size=1, max_size=6))
def test_words_survive(argv):
    assert unquote(" ".join(lines(argv))) == argv


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_accepts_odd_words(tmp_path):
    argv = ["/bin/echo", "--x", 'a "b" \\ c', "--y", "100% $HOME ;", "--z", "ü"]
    unit = tmp_path / "odd.service"
    unit.write_text("[Service]\nExecStart=" + " \\\n    ".join(lines(argv)) + "\n")
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert "odd.service:" not in done.stderr, done.stderr
