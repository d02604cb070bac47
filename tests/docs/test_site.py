"""What builds the site: the check of its pages, docstrings as Markdown, figures that name what there is."""

import importlib.util
import re
import xml.etree.ElementTree as ET

import pytest

from tests.package.test_readme import ROOT


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / "site" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestSelfContained:
    def problems(self, site, page, style=""):
        (site / "other.html").write_text('<h1 id="there">x</h1>')
        (site / "style.css").write_text(style)
        (site / "index.html").write_text(f'<link rel="stylesheet" href="style.css">{page}')
        return script("self_contained").problems(site)

    def test_a_page_that_loads_and_links_only_what_is_there_passes(self, tmp_path):
        page = '<a href="other.html#there">a</a><a href="https://example.org">b</a><img src="data:image/png;base64,AA">'
        assert self.problems(tmp_path, page, 'a{background:url("data:image/svg+xml,x")}') == []

    @pytest.mark.parametrize(
        ("page", "fault"),
        [
            ('<script src="https://cdn.example/x.js"></script>', "loads https://cdn.example/x.js; bundle it"),
            ('<link rel="preconnect" href="https://fonts.example">', "loads https://fonts.example; bundle it"),
            ('<img src="//images.example/x.png">', "loads //images.example/x.png; bundle it"),
            ('<img src="lost.png">', "loads lost.png, which is not in the site"),
            ('<a href="lost.html">x</a>', "leads to lost.html, which is not in the site"),
            ("<p>Items:\n* one</p>", "a list stands as text: * one</p>"),
            ('<a href="other.html#lost">x</a>', "leads to other.html#lost; there is no such heading"),
        ],
    )
    def test_each_fault_is_found(self, tmp_path, page, fault):
        assert self.problems(tmp_path, page) == [f"index.html: {fault}"]

    def test_a_style_that_loads_from_elsewhere_is_found(self, tmp_path):
        assert self.problems(tmp_path, "", "@import url(https://fonts.example/x.css);") != []


def test_doctests_become_code_and_citations_links():
    pytest.importorskip("griffe")
    docstrings = script("docstrings")
    sections = {"numerics": docstrings.anchors("numerics.md")}
    text = docstrings.rendered("Rounds.\n\nSource: numerics.md 4.\n\n>>> f(1)\n[[1]]\n\nMore.", sections)
    assert "[numerics.md 4](../spec/numerics.md#4-stochastic-rounding)" in text
    assert "```pycon\n>>> f(1)\n[[1]]\n```\n\nMore." in text


@pytest.mark.parametrize("name", ["house", "gemms"])
def test_a_figure_is_sound_and_describes_itself(name):
    figure = ET.parse(ROOT / "docs" / "pictures" / f"{name}.svg").getroot()
    texts = [element.text for element in figure.iter() if element.text]
    assert figure.get("role") == "img" and all(texts)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", (ROOT / "docs/pictures" / f"{name}.svg").read_text())


def test_the_architecture_names_every_room():
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    drawn = {e.text for e in ET.parse(ROOT / "docs" / "pictures" / "house.svg").iter() if e.text}
    rooms = {path.parent.name for path in (ROOT / "jaxlowprec").glob("*/__init__.py")}
    assert rooms <= drawn
    for room in rooms:
        assert f"`{room}`" in page


def test_nothing_in_the_configuration_loads_from_elsewhere():
    text = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in text and "http" not in text
