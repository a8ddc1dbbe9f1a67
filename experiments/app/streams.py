"""Output to terminals and pipes that cannot show every character."""

import codecs
import sys
import unicodedata

PLAIN = {"–": "-", "—": "-", "·": "|", "×": "x", "±": "+-", "…": "...", "→": "->", "≥": ">=", "≤": "<=", "█": "#"}
PLAIN |= {part: "#" if part < "▌" else " " for part in "▉▊▋▌▍▎▏"}  # of a bar: halves are rounded down
HANDLER = "specdec.plain"


def _plain(error: UnicodeError) -> tuple[str, int]:
    """Replacements for characters that a stream cannot encode."""
    assert isinstance(error, UnicodeEncodeError)
    found = []
    for character in error.object[error.start : error.end]:
        letters = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
        found.append(PLAIN.get(character) or letters or "?")
    return "".join(found), error.end


def write_plain_characters() -> None:
    """Let the standard streams write plain characters in place of those that they cannot encode. Files are UTF-8."""
    codecs.register_error(HANDLER, _plain)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=HANDLER)
