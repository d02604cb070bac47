"""The error that reading and writing checkpoints raises, and how messages show text from files."""

from __future__ import annotations

from jaxlowprec.arguments import cut

_LONGEST = 1200  # characters of a message: names in files may have megabytes
_SHOWN = 80  # characters of a value in a message


class CheckpointError(ValueError):
    """A checkpoint, or a request about it, is wrong: the message says where, what, and what to do.

    >>> len(str(CheckpointError("x" * 5000))) < 1300
    True
    """

    def __init__(self, message: str):
        super().__init__(cut(message, _LONGEST))


def brief(value: object) -> str:
    """A value as messages show it: `repr`, shortened.

    >>> brief("F99")
    "'F99'"
    >>> brief([1] * 1000)
    '[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, ... 2920 characters left out ... 1, 1, 1, 1, 1, 1, 1]'
    """
    return cut(repr(value), _SHOWN)


def escaped(text: str) -> str:
    r"""Text that is safe on a terminal: characters that are not printable become Python escape sequences.

    >>> escaped("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
