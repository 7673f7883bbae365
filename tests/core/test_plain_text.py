"""Text of third parties cannot control a terminal."""

import pytest

from fuseplug.report.plain_text import one_line, some_lines


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("as it is: é, 中, 🙂", "as it is: é, 中, 🙂"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]8;;https://example.org\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]0;a title\x07text", "text"),
        ("\x9b2Jcleared", "cleared"),
        ("over\rwritten\b\b", "overwritten"),
        ("two\r\n  lines\n\n", "two lines"),
        ("a\ttab", "a   tab"),
        ("\u202eturned\u2066\u200b", "turned"),
        ("\ud800", ""),
        (OSError("an error"), "an error"),
    ],
    ids=ascii,
)
def test_one_line(text, line):
    assert one_line(text) == line


def test_some_lines_keep_their_indentation():
    assert some_lines("first\x1b[K\r\n    second\x00") == "first\n    second"
