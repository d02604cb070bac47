"""The page of `jaxlowprec report` in a browser: headless Chromium."""

import shutil

import numpy as np
import pytest

import jaxlowprec as jlp
from jaxlowprec.ops.statistics.finish import LENGTH, SCALARS
from jaxlowprec.telemetry.measures import of_gemm
from jaxlowprec.telemetry.probes import AS_TRAINED, TENSORS
from jaxlowprec.telemetry.report.page import page

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
LAYERS = [f"blocks/{i}/{name}" for i in (0, 2, 10) for name in ("down", "qkv")]


def write_run(path, seed):
    """A run of six layers and eight records."""
    rng = np.random.default_rng(seed)
    with jlp.telemetry.Recorder(path, every=10, recipe="nvfp4") as recorder:
        for step in range(0, 80, 10):
            found = {}
            for layer in LAYERS:
                rows = np.zeros((len(TENSORS), LENGTH), np.float32)
                rows[:, : len(SCALARS)] = rng.uniform(0, 0.1, (len(TENSORS), len(SCALARS)))
                rows[:, 0] = 1
                rows[:, len(SCALARS) : len(SCALARS) + 16] = 1 / 16  # of 32 codes
                rows[:, len(SCALARS) + 32 : len(SCALARS) + 36] = 1 / 4  # of 32 octaves
                found[layer] = {AS_TRAINED: rows, "mxfp8": rows / 2 + 0.5 * (np.arange(LENGTH) == 0)}
            recorder.record(step, found, loss=2 + np.exp(-step / 30) + 0.01 * rng.normal())
    return jlp.telemetry.load(path)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The URL of a page of two runs and a noise floor."""
    pytest.importorskip("vl_convert")
    folder = tmp_path_factory.mktemp("report")
    runs = [write_run(folder / name / "telemetry.jsonl", seed) for seed, name in enumerate(("bf16", "nvfp4", "again"))]
    out = folder / "report.html"
    out.write_text(page(runs[:2], noise_floor=runs[2]), encoding="utf-8")
    return out.as_uri()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=[("light", 1200), ("dark", 1200), ("light", 360)], ids=["light", "dark", "phone"])
def opened(request, browser, report):
    """The page; the test fails if it has written to the console's errors or asked for anything from a network."""
    scheme, width = request.param
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800}, offline=True)
    context.set_default_timeout(10_000)
    tab = context.new_page()
    errors, requests = [], []
    tab.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("request", lambda asked: requests.append(asked.url))
    tab.goto(report)
    for chart in ("loss", "gap", "heatmap", "curves", "codes", "scales"):
        tab.wait_for_selector(f"#{chart} svg")
    yield tab
    context.close()
    assert errors == []
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []


@pytest.fixture
def shown(browser, tmp_path):
    """A function that opens the page of some runs."""
    pytest.importorskip("vl_convert")
    contexts = []

    def show(*runs):
        out = tmp_path / "report.html"
        out.write_text(page(runs), encoding="utf-8")
        contexts.append(browser.new_context(viewport={"width": 1200, "height": 800}, offline=True))
        tab = contexts[-1].new_page()
        tab.errors = []
        tab.on("pageerror", lambda error: tab.errors.append(str(error)))
        tab.goto(out.as_uri())
        tab.wait_for_selector("#loss svg")
        return tab

    yield show
    for context in contexts:
        context.close()


def without_layers(path, losses):
    """A run that no layer was measured in, as bf16 runs are."""
    with jlp.telemetry.Recorder(path, every=10, recipe="bf16") as recorder:
        for step, loss in enumerate(losses):
            recorder.record(10 * step, {}, loss=loss)
    return jlp.telemetry.load(path)


def test_it_opens_on_a_run_that_has_statistics(shown, tmp_path):
    plain = without_layers(tmp_path / "bf16/telemetry.jsonl", [2.0] * 8)
    tab = shown(plain, write_run(tmp_path / "nvfp4/telemetry.jsonl", 1))
    tab.wait_for_selector("#curves svg")
    assert tab.input_value("#run") == "nvfp4"
    assert tab.locator("#run option").all_text_contents() == ["nvfp4"]  # the other has nothing to choose
    assert all(tab.input_value(f"#{select}") for select in ("tensor", "statistic", "layer"))
    assert [word for word in words(tab, "heatmap") if word in LAYERS] == LAYERS
    assert tab.errors == []


def test_it_opens_on_a_tensor_that_has_the_statistic(shown, tmp_path):
    run = write_run(tmp_path / "nvfp4/telemetry.jsonl", 1)
    for record in run.records:
        for name, tensors in record.layers.items():
            record.layers[name] = {"fprop": of_gemm([1, 0.01]), **tensors}  # a GEMM has no underflow
    tab = shown(run)
    assert (tab.input_value("#statistic"), tab.input_value("#tensor")) == ("underflow", TENSORS[0])
    assert "fprop" not in tab.locator("#tensor option").all_text_contents()
    tab.select_option("#statistic", "sqnr")
    assert "fprop" in tab.locator("#tensor option").all_text_contents()


def test_runs_without_statistics_have_no_empty_controls(shown, tmp_path):
    tab = shown(without_layers(tmp_path / "bf16/telemetry.jsonl", [2.0] * 8))
    assert not tab.locator("#every-layer").is_visible() and not tab.locator("#one-layer").is_visible()
    assert tab.errors == []


def test_the_gap_of_few_records_is_no_flat_line(shown, tmp_path):
    runs = [
        without_layers(tmp_path / name / "telemetry.jsonl", losses)
        for name, losses in (("bf16", [2.0] * 6), ("nvfp4", [2.0, 2.2, 2.1, 2.3, 2.0, 2.4]))
    ]
    tab = shown(*runs)
    tab.wait_for_selector("#gap svg")
    path = tab.locator("#gap svg .mark-line path").first.get_attribute("d")
    heights = {point.split(",")[1] for point in path.replace("M", "L").split("L") if "," in point}
    assert len(heights) >= 5
    assert "mean of" not in " ".join(words(tab, "gap"))


def words(tab, chart):
    """The texts of a chart."""
    return tab.locator(f"#{chart} svg text").all_text_contents()


def test_it_shows_all_layers_and_runs(opened):
    assert [word for word in words(opened, "heatmap") if word in LAYERS] == LAYERS
    assert {"bf16", "nvfp4", "again"} <= set(words(opened, "loss"))
    assert {"underflow, fraction of elements", "SQNR, dB"} <= set(words(opened, "curves"))
    assert {"as trained", "mxfp8"} <= set(words(opened, "curves"))


def test_it_fits_the_window(opened):
    width = opened.evaluate("document.documentElement.scrollWidth")
    assert width <= opened.viewport_size["width"]


def test_a_statistic_can_be_chosen(opened):
    before = opened.locator("#heatmap svg").inner_html()
    opened.select_option("#statistic", "sqnr")
    opened.wait_for_function("before => document.querySelector('#heatmap svg').innerHTML !== before", arg=before)
    assert "SQNR, dB" in words(opened, "heatmap")


def test_a_click_chooses_the_layer(opened):
    assert opened.input_value("#layer") == LAYERS[0]
    opened.locator("#heatmap svg .mark-rect.role-mark path").last.click()
    opened.wait_for_function("() => document.getElementById('layer').value !== 'blocks/0/down'")
    assert opened.input_value("#layer") == LAYERS[-1]


def test_text_and_background_differ_by_the_scheme(opened):
    dark = opened.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    background = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    labels = opened.locator("#heatmap svg text").first.get_attribute("fill")
    assert (background, labels) == (("rgb(26, 26, 25)", "#c3c2b7") if dark else ("rgb(252, 252, 251)", "#52514e"))
