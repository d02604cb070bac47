"""The charts of benchmarks/results: they say what was measured, and can be read on a phone and in the dark."""

import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from tests.scripts.stand_ins import SOURCE

BENCHMARKS = SOURCE / "benchmarks"
pytestmark = pytest.mark.skipif(not (BENCHMARKS / "tables.py").exists(), reason="not in the source tree")
PICTURES = sorted((SOURCE / "docs" / "pictures").glob("*.svg"))
CHARTS = [p for p in PICTURES if "benchmarks" in p.read_text()[:400]]


@pytest.fixture
def copy(tmp_path):
    """Benchmarks and documents that a test may change."""
    for folder in ("benchmarks", "docs"):
        shutil.copytree(SOURCE / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def check(root):
    command = [sys.executable, root / "benchmarks" / "tables.py", "--check"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def change_result(root, name, change):
    file = root / "benchmarks" / "results" / f"{name}.json"
    result = json.loads(file.read_text())
    change(result)
    file.write_text(json.dumps(result))


def test_charts_and_tables_are_what_the_results_say():
    done = check(SOURCE)
    assert done.returncode == 0, done.stderr


def test_a_chart_that_was_changed_by_hand_fails(copy):
    chart = copy / "docs" / "pictures" / "matmuls.svg"
    chart.write_text(chart.read_text().replace("1.65x", "2.65x"))
    done = check(copy)
    assert done.returncode == 1 and done.stderr.startswith("docs/pictures/matmuls.svg: not what benchmarks/results say")


def test_a_chart_of_older_results_fails(copy):
    change_result(copy, "train_step", lambda result: result["cases"][0]["ratio"].update(median=9.0))
    assert "docs/pictures/training_step.svg" in check(copy).stderr


def test_a_chart_whose_case_was_not_measured_is_an_error(copy):
    change_result(copy, "weight_sync", lambda result: result["cases"].pop())
    done = check(copy)
    assert done.returncode == 1 and "the results have 0 cases 'w4a16 on the way" in done.stderr


def test_a_table_that_no_document_shows_is_an_error(copy):
    document = next(p for p in (copy / "docs").rglob("*.md") if "<!-- table: scaling -->" in p.read_text())
    document.write_text(document.read_text().replace("<!-- table: scaling -->", ""))
    assert "no document has a place for the tables scaling" in check(copy).stderr


class TestChart:
    @pytest.fixture(autouse=True, params=CHARTS, ids=[p.stem for p in CHARTS])
    def _chart(self, request):
        self.text = request.param.read_text()
        self.svg = ET.fromstring(self.text)

    def written(self):
        return [e for e in self.svg.iter() if e.tag.endswith("}text")]

    def test_letters_have_11_pixels_where_a_phone_shows_it_360_wide(self):
        smallest = min(float(e.get("font-size")) for e in self.written())
        assert smallest * 360 / float(self.svg.get("width")) >= 11

    def test_nothing_is_drawn_beyond_the_edge(self):
        width = float(self.svg.get("width"))
        for e in self.written():
            x, wide = float(e.get("x")), 0.6 * float(e.get("font-size")) * len(e.text)
            left = x - wide if e.get("text-anchor") == "end" else x
            assert left >= 0 and left + wide <= width, e.text
        for e in self.svg.iter():
            if e.tag.endswith("}rect"):
                assert float(e.get("x")) + float(e.get("width")) <= width

    def test_has_colours_for_light_and_dark_pages(self):
        light, dark = self.text.split("@media (prefers-color-scheme:dark)")
        styles = set(re.findall(r"\.(\w+)\{(?:fill|stroke)", light))
        assert styles == set(re.findall(r"\.(\w+)\{(?:fill|stroke)", dark))
        assert {e.get("class") for e in self.svg.iter()} - {None} <= styles

    def test_bars_say_what_1x_is(self):
        words = [e.text for e in self.written()]
        assert any(w.startswith("1x is ") for w in words) or not any(re.fullmatch(r"\d+\.\d\dx", w) for w in words)


def test_every_run_of_the_study_is_named_beside_its_curve():
    runs = {s["run"] for s in json.loads((BENCHMARKS / "results" / "training_study.json").read_text())["summary"]}
    for name in ("training_gap", "training_gap_longest"):
        text = (SOURCE / "docs" / "pictures" / f"{name}.svg").read_text()
        curves = re.findall(r'<polyline class="(line\d|noise)"', text)
        assert all(f">{run}</text>" in text for run in runs)
        assert len(set(curves)) == len(runs)
