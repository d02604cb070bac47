"""A hook of MkDocs: built pages load nothing from elsewhere, their links lead somewhere, and no list stands as text."""

from __future__ import annotations

import html.parser
import pathlib
import re
from typing import Any
from urllib.parse import unquote, urlsplit

_LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
_CODE = re.compile(r"<pre>.*?</pre>", re.DOTALL)
_LIST = re.compile(r"^\* .*", re.MULTILINE)  # Python-Markdown wants a blank line before a list, and 4 spaces within
_IMPORTED = re.compile(r"(?:@import\s+|url\()[\"']?((?:https?:)?//[^\"')\s]+)")


class Page(html.parser.HTMLParser):
    """What a page loads, where it leads, and the anchors it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: set[str] = set()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.lists = _LIST.findall(_CODE.sub("", text))
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Called for each element."""
        found = {name: value for name, value in attributes if value}
        if "id" in found:
            self.anchors.add(found["id"])
        if tag == "a" and "href" in found:
            self.links.add(found["href"])
        elif tag in _LOADED and found.get("rel") != "canonical" and _LOADED[tag] in found:
            self.loaded.add(found[_LOADED[tag]])


def _target(page: pathlib.Path, address: str, site: pathlib.Path) -> pathlib.Path:
    """The file that an address within the site names."""
    path = unquote(urlsplit(address).path)
    return (site / path[1:] if path.startswith("/") else page.parent / path).resolve() if path else page


def problems(site: pathlib.Path) -> list[str]:
    """What is wrong with a built site, a line for each fault."""
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site)
        for address in sorted(page.loaded):
            if urlsplit(address).netloc:
                found.append(f"{name}: loads {address}; bundle it")
            elif not urlsplit(address).scheme and not _target(path, address, site).exists():
                found.append(f"{name}: loads {address}, which is not in the site")
        found += [f"{name}: a list stands as text: {line}" for line in page.lists]
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = _target(path, link, site)
            if not target.exists():
                found.append(f"{name}: leads to {link}, which is not in the site")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{name}: leads to {link}; there is no such heading")
    for style in sorted(site.rglob("*.css")):
        found += [f"{style.relative_to(site)}: loads {address}" for address in _IMPORTED.findall(style.read_text())]
    return found


def on_post_build(config: Any) -> None:
    """Called by MkDocs when all pages are written."""
    from mkdocs.exceptions import PluginError  # the rest of this file needs no MkDocs

    if found := problems(pathlib.Path(config.site_dir).resolve()):
        raise PluginError("the site is not self-contained:\n" + "\n".join(found))
