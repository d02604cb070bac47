"""docs/spec: every citation names a section that is there; examples and tables are what the library gives."""

import doctest
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from tests.helpers import as_bytes, often

ROOT = pathlib.Path(__file__).parents[2]
SPEC = ROOT / "docs" / "spec"
PAGES = {page.name: page.read_text() for page in sorted(SPEC.glob("*.md"))}
CITED = sorted(set(PAGES) - {"README.md"})
CITING = ("jaxlowprec", "xla_ffi", "tests", "docs", "examples", "benchmarks", "scripts", "cmake")
SOURCES = {".py", ".h", ".cc", ".cu", ".cuh", ".md", ".txt", ".cmake", ".sh", ".toml", ""}

GAP = r"(?:[ \t]*\n[ \t]*(?://+|#+)?[ \t]*|[ \t]+)"  # between words, over the end of a line of a comment too
NUMBER = r"\d+(?:\.\d+)*"
CITATION = re.compile(
    rf"\b(?P<page>\w+\.md)(?:'s)?(?:,?{GAP}(?P<title>Notation))?(?:(?:{GAP}and)?{GAP}"
    rf"(?P<numbers>{NUMBER}(?:(?:,{GAP}|,?{GAP}and{GAP}|{GAP}to{GAP}){NUMBER})*))?"
)


def sections(text):
    """The numbers of a page's headings, or the titles of those without one."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {found[1] if (found := re.match(rf"({NUMBER})\.? ", heading)) else heading for heading in headings}


SECTIONS = {name: sections(text) for name, text in PAGES.items()}


def cited(numbers):
    """The sections that "1, 2 and 4 to 7" names."""
    found = []
    for part in re.split(rf",?{GAP}and{GAP}|,{GAP}", numbers):
        ends = re.findall(NUMBER, part)
        chapter, _, first = ends[0].rpartition(".")
        last = int(ends[-1].rpartition(".")[2])
        found += [f"{chapter}.{n}".strip(".") for n in range(int(first), last + 1)]
    return found


def citations(text):
    """(line, page, section) of each; the page must be of the specification, or the section be a number."""
    for match in CITATION.finditer(text):
        line, page = text.count("\n", 0, match.start()) + 1, match["page"]
        if match["title"] and page in SECTIONS:
            yield line, page, match["title"]
        for number in cited(match["numbers"]) if match["numbers"] else ():
            yield line, page, number


def unresolved(text):
    """The citations that name no section of docs/spec."""
    return [found for found in citations(text) if found[2] not in SECTIONS.get(found[1], ())]


def sources():
    files = [file for folder in CITING for file in (ROOT / folder).rglob("*")]
    for file in (*files, *(f for f in ROOT.iterdir() if not f.name.startswith("."))):
        if file.is_file() and file.suffix in SOURCES and "__pycache__" not in file.parts:
            yield file, file.read_text(errors="replace")


def test_every_citation_names_a_section_and_every_page_has_some():
    """Every file is read once for both."""
    wrong, pages = [], set()
    for file, text in sources():
        pages |= {page for _, page, _ in citations(text)}
        wrong += [
            f"{file.relative_to(ROOT)}:{line}: {page} {section}: docs/spec has no such section"
            for line, page, section in unresolved(text)
        ]
    assert not wrong, "\n".join(wrong)
    assert pages == set(CITED)


@pytest.mark.parametrize("wrong", ["99", "1 and 99", "1 to 99", "1,\n/// 99", "1.99", "\n# 99", "99's bound"])
def test_a_planted_citation_of_no_section_is_found(wrong):
    for page in CITED:
        assert not unresolved(f"({page} 1)")
        assert unresolved(f"# one line\n({page} {wrong}).")


def test_a_planted_citation_of_no_page_is_found():
    assert unresolved("Source: {}.md 3.".format("jax_facts")) == [(1, "jax_facts.md", "3")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1, 2 and 4 to 7).", ["1", "2", "4", "5", "6", "7"]),
        ("1.1, 1.2 and 1.4.", ["1.1", "1.2", "1.4"]),
        ("1.4 and 2.1 to 2.3;", ["1.4", "2.1", "2.2", "2.3"]),
        ("4; Salmon et al., SC 2011", ["4"]),
        ("1 to 7; arXiv 2509.25149", ["1", "2", "3", "4", "5", "6", "7"]),
        ("3 and 4; arXiv 2509.25149, section 4.2", ["3", "4"]),
        ("1.1, column A, in torch", ["1.1"]),
        ("6. Bytes repeat", ["6"]),
    ],
)
def test_sections_that_a_citation_names(text, expected):
    assert [section for _, _, section in citations(f"Source: {CITED[0]} {text}")] == expected


def test_files_that_the_specification_names_are_there():
    for page, text in PAGES.items():
        named = re.findall(r"`((?:tests|xla_ffi|jaxlowprec)/[\w./]+)`", text)
        assert all((ROOT / name).exists() for name in named), (page, [n for n in named if not (ROOT / n).exists()])


def anchor(heading):
    """As GitHub and MkDocs make it."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())


def test_links_within_the_documents_lead_somewhere():
    for page, text in PAGES.items():
        for target in re.findall(r"\]\(([^)]+)\)", text):
            path, _, fragment = target.partition("#")
            file = (SPEC / path).resolve() if path else SPEC / page
            assert file.is_file(), (page, target)
            assert not fragment or fragment in map(anchor, re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)), (
                page,
                target,
            )


@pytest.mark.parametrize("page", ["numerics.md", "int4_qat.md"])
@pytest.mark.parametrize("implementation", often([None], [None, "reference"]))
def test_the_worked_examples_are_what_the_library_computes(page, implementation):
    text = PAGES[page]
    assert "implementation = None " in text
    text = text.replace("implementation = None ", f"implementation = {implementation!r} ")
    said = []
    test = doctest.DocTestParser().get_doctest(text, {}, page, str(SPEC / page), 0)
    result = doctest.DocTestRunner().run(test, out=said.append)
    assert result.attempted > 10 and not result.failed, "".join(said)


def test_a_wrong_byte_of_a_worked_example_is_found():
    text = PAGES["int4_qat.md"].replace("0x5000000", "0x4000000")
    test = doctest.DocTestParser().get_doctest(text, {}, "planted", None, 0)
    assert doctest.DocTestRunner().run(test, out=lambda _: None).failed == 1


@pytest.mark.slow
def test_the_expected_errors_are_what_the_library_has():
    rows = re.findall(r"^\| `(\w+\(.*\))` \| ([\d.]+) \| ([\d.]*) ?\|$", PAGES["numerics.md"], re.MULTILINE)
    assert len(rows) == 12
    x = jax.random.normal(jax.random.key(0), (1024, 1024))
    for made, nearest, stochastic in rows:
        fmt = eval(f"jlp.{made}")
        found = [jlp.quantize(x, fmt).dequantize()]
        if stochastic:
            found.append(jlp.quantize(x, fmt, rounding="stochastic", key=jax.random.key(1)).dequantize())
        said = [float(number) for number in (nearest, stochastic) if number]
        assert [1000 * float(jnp.mean((y - x) ** 2)) for y in found] == pytest.approx(said, rel=0.01), made


@pytest.mark.slow
def test_what_saturation_takes_is_what_the_page_says():
    x = np.asarray(jax.random.normal(jax.random.key(0), (1024, 1024)))
    q = jlp.quantize(x, jlp.NVFP4())
    scale = np.repeat(np.asarray(q.scale).astype(np.float32), 16, axis=-1) * float(q.amax) / 2688
    lost = np.maximum(0, np.abs(x) - 6 * scale)
    beyond = lost > 0
    found = beyond.mean(), (lost / np.abs(x))[beyond].mean(), (lost * np.abs(x)).sum() / (x * x).sum()
    said = re.search(
        r"([\d.]+) % of these numbers do, and lose ([\d.]+) % on average.* is ([\d.]+) % less",
        PAGES["numerics.md"],
        re.DOTALL,
    )
    assert [100 * number for number in found] == pytest.approx([float(number) for number in said.groups()], rel=0.02)
    assert (lost / np.abs(x)).max() <= 1 / 17 + 1e-6


@pytest.mark.slow
def test_slimes_weights_differ_as_often_as_the_table_says():
    row = re.compile(r"^\| (symmetric|asymmetric) \(column [AB]\) \| ([\d.]+) % \| ([\d.]+) % \|$", re.MULTILINE)
    rows = row.findall(PAGES["int4_qat.md"])
    assert len(rows) == 2
    x = (0.02 * jax.random.normal(jax.random.key(7), (512, 1024))).astype(jnp.bfloat16)
    for kind, *said in rows:
        found = []
        for group_size in (32, 128):
            fmt = jlp.Int4(group_size, kind == "symmetric", rule="slime")
            differ = as_bytes(jlp.fake_quantize(x, fmt)) != as_bytes(jlp.quantize(x, fmt).dequantize())
            found.append(100 * np.mean(differ))
        assert found == pytest.approx([float(number) for number in said], abs=0.3)
