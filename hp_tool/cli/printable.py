"""Escape control characters in text before it is printed to a terminal."""

import re

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters other than tab and line feed, and characters that change the text
direction.
"""


def escape_control_characters(text: str) -> str:
    """Escape control characters. Names and scripts may contain them."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
