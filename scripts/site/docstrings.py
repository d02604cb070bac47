"""Docstrings as the site's pages need them: doctests as code, citations of the specification as links."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import griffe

SPEC = pathlib.Path(__file__).parents[2] / "docs" / "spec"
_DOCTEST = re.compile(r"(?:^>>> .*\n(?:^(?!\s*$).*\n?)*\n?)+", re.MULTILINE)
_CITATION = re.compile(r"\b(numerics|int4_qat|transformer_engine_numerics)\.md (\d+(?:\.\d+)?)\b")
_HEADING = re.compile(r"^#+ (\d+(?:\.\d+)?)\.? (.*)$", re.MULTILINE)


def anchors(page: str) -> dict[str, str]:
    """Of each numbered section of a page of the specification, the anchor that the site gives it."""
    found = {}
    for number, title in _HEADING.findall((SPEC / page).read_text()):
        words = re.sub(r"[^\w\s-]", "", f"{number} {title}").strip().lower()
        found[number] = re.sub(r"[-\s]+", "-", words)
    return found


def rendered(text: str, sections: dict[str, dict[str, str]]) -> str:
    """A docstring as Markdown. Sections that do not exist stay as they are: tests/package/test_spec.py finds them."""

    def link(match: re.Match[str]) -> str:
        anchor = sections.get(match[1], {}).get(match[2])
        return match[0] if anchor is None else f"[{match[0]}](../spec/{match[1]}.md#{anchor})"

    text = _CITATION.sub(link, text)
    return _DOCTEST.sub(lambda match: f"```pycon\n{match[0].rstrip()}\n```\n\n", text + "\n").rstrip()


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def __init__(self) -> None:
        pages = ("numerics", "int4_qat", "transformer_engine_numerics")
        self.sections = {page: anchors(f"{page}.md") for page in pages}

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for every object of the package."""
        if obj.docstring is not None:
            obj.docstring.value = rendered(obj.docstring.value, self.sections)
