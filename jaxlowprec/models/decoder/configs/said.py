"""The content of a config.json, read key by key, with errors that name the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from jaxlowprec.arguments import finite_number, shown

LARGEST = 2**31 - 1
MOST_LAYERS = 1 << 14
"""Sizes beyond these are refused before anything is made for each layer; published models have hundreds of layers."""


class Said:
    """The content of a config, and errors about it.

    Arguments:
        content: of config.json.
        where: the file, for errors.

    Attributes:
        last: the key that was read last.
    """

    def __init__(self, content: Mapping[str, Any], where: str):
        self.content, self.where, self.last = content, where, "model_type"

    def refuse(self, key: str, needed: str) -> NoReturn:
        """Raises ValueError about a key."""
        raise ValueError(f"{self.where}: {key} is {shown(self.content.get(key))}; this decoder needs {needed}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key; the default if there is none or it is null."""
        self.last = key
        value = self.content.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None, least: int = 1, most: int = LARGEST) -> int:
        """A whole number of `least` to `most`."""
        value = self.get(key, default)
        if type(value) is not int or not least <= value <= most:
            self.refuse(key, f"a whole number, {least} or more and at most {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        value = finite_number(self.get(key, default))
        if value is None or not value > 0:
            self.refuse(key, "a number above 0")
        return value

    def number_or_none(self, key: str, default: float | None = None) -> float | None:
        """A number above 0, or None if the file says null; the default if it says nothing."""
        value = self.content.get(key, default)
        return None if value is None else self.number(key, default)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        return bool(self.get(key, default))

    def only(self, key: str, value: Any, why: str) -> None:
        """Refuses a key that has another value than the only one that this decoder computes."""
        if self.get(key, value) != value:
            self.refuse(key, why)
