"""The places that two pages name are there: files, folders and symbols of the sources."""

import re

from tests.package.test_readme import ROOT

PAGE = (ROOT / "docs/how-to/extending.md").read_text()
PLACES = re.findall(r"^\| [\d, to]+ \| ([^|]+) \|", PAGE, re.MULTILINE)
FOLDERS = [ROOT / "jaxlowprec", ROOT / "xla_ffi"]


def test_every_place_is_there():
    sources = [
        file for folder in FOLDERS for file in folder.rglob("*") if file.suffix in (".py", ".h", ".cc", ".cu", ".cuh")
    ]
    names = {
        part
        for file in sources
        for part in (file.name, file.stem, file.parent.name, str(file.parent.relative_to(ROOT)))
    }
    words = set(re.findall(r"\w+", "\n".join(file.read_text() for file in sources)))
    named = [name for place in PLACES for name in re.findall(r"`([^`<]+)`", place)]
    assert len(PLACES) > 30 and len(named) > 30
    assert [name for name in named if name not in names | words | {".cuh", ".cu"}] == []


def test_every_line_of_the_overview_leads_to_a_section():
    anchors = re.findall(r"\]\(#([\w-]+)\)", PAGE)
    assert set(anchors) == {
        "-".join(title.lower().split()) for title in re.findall(r"^## (An? \w+)$", PAGE, re.MULTILINE)
    }


def test_the_files_of_a_kernel_have_the_symbols_of_its_page():
    page = (ROOT / "docs/explanation/kernel.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", page, re.MULTILINE)
    assert len(rows) > 20
    for file, symbols in rows:
        words = set(re.findall(r"\w+", (ROOT / file).read_text()))
        assert set(re.findall(r"`(\w+)`", symbols)) <= words, file
