"""The page of all public names, from `__all__` of the public modules: `python scripts/site/names.py` writes it."""

from __future__ import annotations

import importlib
import pathlib
import types
from collections.abc import Iterator

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "reference" / "names.md"
_HEAD = """# All public names

Every public name once, with a link to what it does. `scripts/site/names.py` writes this page from `__all__` of the
public modules, and a test compares them. [What is stable](stability.md) says what is promised of these names.
"""


def modules(name: str = "jaxlowprec") -> Iterator[types.ModuleType]:
    """A public module, and those that its `__all__` has."""
    module = importlib.import_module(name)
    yield module
    for member in module.__all__:
        if isinstance(getattr(module, member), types.ModuleType):
            yield from modules(f"{name}.{member}")


def names(module: types.ModuleType) -> list[str]:
    """The public names of a module but for modules, and but for those that another module has a page for."""
    elsewhere = set(importlib.import_module("jaxlowprec.ops").__all__) if module.__name__ == "jaxlowprec" else set()
    own = {name for name in module.__all__ if not isinstance(getattr(module, name), types.ModuleType)}
    return sorted(own - elsewhere, key=lambda name: (name.lower(), name))


def page() -> str:
    """The page's text."""
    parts = [_HEAD]
    for module in modules():
        path = module.__name__
        file = f"{path.rpartition('.')[2]}.md"
        of_kinds: dict[str, list[str]] = {"functions": [], "classes": [], "constants": []}
        for name in names(module):
            value = getattr(module, name)
            kind = "classes" if isinstance(value, type) else "functions" if callable(value) else "constants"
            of_kinds[kind].append(f"[`{name}`]({file}#{path}.{name})")
        rows = [f"| {kind} | {', '.join(links)} |" for kind, links in of_kinds.items() if links]
        also = "They are names of `jaxlowprec`, too.\n\n" if path == "jaxlowprec.ops" else ""
        parts.append(f"## [`{path}`]({file})\n\n{also}| | |\n| --- | --- |\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
