"""Regular expressions from files, matched in time proportional to the text: by sets of positions, without backtracking.

Each character that an expression consumes has a position (Glushkov's construction). The positions that a text has
reached are one set, the bits of an integer, and a character leads from one set to the next. Python's `re` would try the
ways through `(a+)+$` one after the other, of which there are 2**n.

Literals, `.`, sets, `\\d \\w \\s`, groups, `|`, `* + ? {m,n}` also lazy, `^` at the beginning, `$` and `\\Z` match what
`re.match` does. What looks around, refers back or sets flags is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Iterator

LONGEST = 4096
"""The most characters of an expression, and positions after its repetitions are written out."""

_DEEPEST = 50
_END, _VERY_END = "$", "\\Z"
_LETTERS: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "w": lambda c: c.isalnum() or c == "_",
    "s": str.isspace,
}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}

_Set = tuple[bool, tuple[str, ...]]
"""Characters: whether all but these; characters, ranges such as "a-z" and letters such as "\\d"."""


@dataclasses.dataclass(frozen=True)
class _Part:
    """A part of an expression: whether it matches nothing as well, and the positions that begin and that end it."""

    empty: bool
    first: int
    last: int


class Expression:
    """A regular expression.

    Attributes:
        literal: the text that it stands for, if it is only that.
        size: its number of positions.

    Raises:
        ValueError: it is not valid, is too long, or has a part that is not matched here.

    >>> Expression(r"model\\.layers\\.\\d+\\.(up|gate)_proj$").matches("model.layers.12.up_proj")
    True
    >>> Expression("(a+)+$").matches("a" * 100_000 + "!")
    False
    """

    def __init__(self, text: str):
        if len(text) > LONGEST:
            raise ValueError(f"it has {len(text)} characters; at most {LONGEST} are matched")
        try:
            re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"it is not valid: {error}") from None
        self._sets: list[_Set | str] = []
        self._follow: list[int] = []
        self._text, self._at = text, 0
        self._whole = self._either(0)
        if self._at < len(text):
            raise ValueError(f"{text[self._at :][:20]!r} is not matched here")
        self.size = len(self._sets)
        self.literal = self._literal()
        self._masks: dict[str, int] = {}
        self._next: dict[int, int] = {}

    def matches(self, text: str) -> bool:
        """Whether the expression matches at the beginning of a text."""
        if self.literal is not None:
            return text.startswith(self.literal)
        if self._whole.empty:
            return True
        reached = self._whole.first
        for at, character in enumerate(text):
            if character == "\n" and at == len(text) - 1:  # `$` is before it, too
                ended, more = self._past(reached, (_END,))
                if ended:
                    return True
                reached |= more
            reached &= self._mask(character)
            if reached & self._whole.last:
                return True
            if not reached:
                return False
            reached = self._after(reached)
        return self._past(reached, (_END, _VERY_END))[0]

    def _past(self, reached: int, anchors: tuple[str, ...]) -> tuple[bool, int]:
        """Whether anchors, which consume nothing, end the expression, and the positions that follow them."""
        mask = functools.reduce(operator.or_, (1 << n for n, one in enumerate(self._sets) if one in anchors), 0)
        seen = followed = 0
        while new := (reached | followed) & mask & ~seen:
            seen |= new
            followed |= self._after(new)
        return bool(seen & self._whole.last), followed

    def _after(self, reached: int) -> int:
        """The positions that may follow those."""
        if (found := self._next.get(reached)) is None:
            found = functools.reduce(operator.or_, (self._follow[n] for n in _bits(reached)), 0)
            if len(self._next) > LONGEST:
                self._next.clear()
            self._next[reached] = found
        return found

    def _mask(self, character: str) -> int:
        """The positions that a character may have."""
        if (found := self._masks.get(character)) is None:
            held: dict[_Set | str, bool] = {one: _holds(one, character) for one in set(self._sets)}
            found = functools.reduce(operator.or_, (1 << n for n, one in enumerate(self._sets) if held[one]), 0)
            if len(self._masks) > LONGEST:
                self._masks.clear()
            self._masks[character] = found
        return found

    def _literal(self) -> str | None:
        chain = self._whole.last == 1 << max(self.size - 1, 0) and self._whole.first == 1 and not self._whole.empty
        chain = chain and all(follow == 1 << n + 1 for n, follow in enumerate(self._follow[:-1]))
        single = [one[1][0] for one in self._sets if not isinstance(one, str) and one[0] is False and len(one[1]) == 1]
        plain = chain and not self._follow[-1] and len(single) == self.size and all(len(c) == 1 for c in single)
        return "".join(single) if plain else None

    # The parser. Each method reads one kind of part and gives its positions.

    def _either(self, depth: int) -> _Part:
        if depth > _DEEPEST:
            raise ValueError(f"its groups are nested more than {_DEEPEST} deep")
        parts = [self._sequence(depth)]
        while self._take("|"):
            parts.append(self._sequence(depth))
        return _Part(any(p.empty for p in parts), _union(p.first for p in parts), _union(p.last for p in parts))

    def _sequence(self, depth: int) -> _Part:
        if depth == 0:
            self._take("^")  # where every match begins
        made = _Part(True, 0, 0)
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            made = self._joined(made, self._repeated(depth))
        return made

    def _joined(self, one: _Part, other: _Part) -> _Part:
        for n in _bits(one.last):
            self._follow[n] |= other.first
        first = one.first | (other.first if one.empty else 0)
        return _Part(one.empty and other.empty, first, other.last | (one.last if other.empty else 0))

    def _repeated(self, depth: int) -> _Part:
        begin = self._at
        part = self._atom(depth)
        if (counts := self._counts()) is not None:  # `re` takes one after another for an error
            end = self._at
            least, most = counts
            if max(least, most or 0) * (len(self._sets) + 1) > LONGEST * 4:
                raise ValueError(f"its repetitions have more than {LONGEST} positions")
            copies = [part] + [self._again(begin, depth) for _ in range(max(least, most or 1, 1) - 1)]
            self._at = end
            part = self._times(copies, least, most)
        return part

    def _again(self, begin: int, depth: int) -> _Part:
        """Another copy of the part that was read there."""
        self._at = begin
        return self._atom(depth)

    def _times(self, copies: list[_Part], least: int, most: int | None) -> _Part:
        if most is None:
            for n in _bits(copies[-1].last):
                self._follow[n] |= copies[-1].first
        if most == 0:
            return _Part(True, 0, 0)
        made = _Part(True, 0, 0)
        for number, copy in enumerate(copies):
            made = self._joined(made, dataclasses.replace(copy, empty=copy.empty or number >= least))
        return made

    def _counts(self) -> tuple[int, int | None] | None:
        """How often the part before is repeated, if it is."""
        found = re.compile(r"(?:([*+?])|\{(\d*)(,?)(\d*)\})(\??)").match(self._text, self._at)
        if found is None or not any(found.groups()[:4]):
            return None
        self._at = found.end()
        if self._at < len(self._text) and self._text[self._at] in "*+?" and not found[5]:
            raise ValueError("possessive repetitions are not matched here")
        if found[1]:
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[found[1]]
        least = int(found[2] or 0)
        return least, (int(found[4]) if found[4] else None) if found[3] else least

    def _atom(self, depth: int) -> _Part:
        character = self._text[self._at]
        self._at += 1
        if character == "(":
            named = re.compile(r"\?:|\?P<\w+>|(?!\?)").match(self._text, self._at)
            if named is None:
                raise ValueError(f"{self._text[self._at - 1 :][:5]!r} is not matched here: only plain groups are")
            self._at = named.end()
            part = self._either(depth + 1)
            self._at += 1  # the bracket, which `re` found
            return part
        if character == "[":
            return self._position(self._set())
        if character == "\\":
            return self._position(self._escaped())
        if character == ".":
            return self._position((True, ("\n",)))
        if character == "$":
            return self._position(_END)
        if character in "^*+?":
            raise ValueError(f"{character} is not matched there")
        return self._position((False, (character,)))

    def _escaped(self) -> _Set | str:
        letter = self._text[self._at]
        self._at += 1
        if letter == "Z":
            return _VERY_END
        if letter.lower() in _LETTERS:
            return letter.isupper(), (f"\\{letter.lower()}",)
        if letter in _CONTROLS:
            return False, (_CONTROLS[letter],)
        if letter.isalnum():
            raise ValueError(f"\\{letter} is not matched here")
        return False, (letter,)

    def _set(self) -> _Set:
        others, items = self._take("^"), list[str]()
        while not items or self._text[self._at] != "]":
            item = self._item()
            if self._text[self._at] == "-" and self._text[self._at + 1] != "]":
                self._at += 1
                item = f"{item}-{self._item()}"
            items.append(item)
        self._at += 1
        return others, tuple(dict.fromkeys(items))

    def _item(self) -> str:
        character = self._text[self._at]
        self._at += 1
        if character != "\\":
            return character
        found = self._escaped()
        if isinstance(found, str) or found[0]:
            raise ValueError("a set holds an escape that is not matched there")
        return found[1][0]

    def _position(self, consumed: _Set | str) -> _Part:
        if len(self._sets) >= LONGEST:
            raise ValueError(f"it has more than {LONGEST} positions")
        self._sets.append(consumed)
        self._follow.append(0)
        bit = 1 << len(self._sets) - 1
        return _Part(False, bit, bit)

    def _take(self, character: str) -> bool:
        if not self._text.startswith(character, self._at):
            return False
        self._at += 1
        return True


def _holds(consumed: _Set | str, character: str) -> bool:
    if isinstance(consumed, str):  # an anchor
        return False
    others, items = consumed
    return others != any(_is(item, character) for item in items)


def _is(item: str, character: str) -> bool:
    if len(item) == 1:
        return item == character
    return _LETTERS[item[1]](character) if len(item) == 2 else item[0] <= character <= item[2]


def _bits(number: int) -> Iterator[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


def _union(sets: Iterator[int]) -> int:
    return functools.reduce(operator.or_, sets, 0)
