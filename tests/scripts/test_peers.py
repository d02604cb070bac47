"""benchmarks/peers.py: what is missing, fails or is wrong is a result that says so, and the rest is measured."""

import importlib
import importlib.metadata
import json
import tomllib

import numpy as np
import pytest

from tests.helpers import run_python
from tests.scripts.stand_ins import SOURCE

BENCHMARKS = SOURCE / "benchmarks"
pytestmark = pytest.mark.skipif(not (BENCHMARKS / "peers.py").exists(), reason="not in the source tree")
TRUTH = np.arange(1, 5, dtype=np.float32)
WITHOUT_CPU = "jax.nn.scaled_matmul, MXFP8"


@pytest.fixture(scope="module", autouse=True)
def importable():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield


def side(numbers=TRUTH, limit=0.1, **codes):
    from rivals.sides import Side

    return Side(lambda: numbers, lambda result: result, limit, lambda result: codes)


def cases_with(*makers, ours=side, packages=("numpy",), repeats=1):
    """Of an operation and peers that make their sides so."""
    from rivals.sides import Operation, Peer, measured

    peers = tuple(Peer(f"peer {i}", packages, make, ("ours",)) for i, make in enumerate(makers))
    return measured(Operation("an operation", TRUTH, {"ours": ours}, peers, repeats), 3)


def refuses():
    raise RuntimeError("no kernel for this\nand a trace")


class TestCases:
    def test_a_peer_is_measured_beside_ours(self):
        from rivals.sides import told

        codes = np.arange(4, dtype=np.uint8)
        theirs = codes.copy()
        theirs[0] = 9
        (case,) = cases_with(lambda: side(1.05 * TRUTH, codes=theirs), ours=lambda: side(codes=codes))
        assert case["ratio"]["median"] == pytest.approx(case["theirs"]["median"] / case["ours"]["median"])
        assert case["error"] == {"ours": 0.0, "theirs": pytest.approx(0.05, rel=1e-4)}
        assert case["same"] == {"codes": 0.75}
        assert told(case).endswith("error 0, 0.05, 75.0 % of the codes the same")

    def test_a_package_that_is_missing_is_named(self):
        (case,) = cases_with(side, packages=("numpy", "no-such-package"))
        assert case["failure"] == "not installed: no-such-package" and "ratio" not in case

    def test_a_peer_that_fails_says_how_and_stops_no_other(self):
        failed, case = cases_with(refuses, side)
        assert failed["failure"] == "RuntimeError: no kernel for this"
        assert case["ratio"]["median"] > 0

    @pytest.mark.parametrize("wrong", [2 * TRUTH, np.full(4, np.nan, np.float32)], ids=["twice", "nan"])
    def test_a_wrong_result_is_not_measured(self, wrong):
        (case,) = cases_with(lambda: side(wrong))
        assert case["failure"].startswith("ArithmeticError: relative error") and "ratio" not in case

    def test_our_own_wrong_result_is_an_error(self):
        with pytest.raises(ArithmeticError, match="relative error 1; its format explains 0.1"):
            cases_with(side, ours=lambda: side(2 * TRUTH))

    def test_a_chain_counts_each_of_its_products(self):
        (once,), (many,) = cases_with(side), cases_with(side, repeats=10**6)
        assert many["ours"]["median"] < once["ours"]["median"] / 10**3


def test_a_peer_is_measured_apart_with_the_sides_that_it_needs():
    from rivals.sides import Operation, Peer, beside

    peers = tuple(Peer(name, ("numpy",), side, (ours,)) for name, ours in (("one", "NVFP4"), ("two", "MXFP8")))
    operations = [Operation("both", TRUTH, {"NVFP4": side, "MXFP8": side}, peers), Operation("none", TRUTH, {}, ())]
    (found,) = beside(operations, ["two"])
    assert (list(found.ours), [peer.name for peer in found.peers]) == (["MXFP8"], ["two"])
    assert beside(operations, ["three"]) == []


def test_the_extra_pins_every_package_that_is_measured():
    rivals = importlib.import_module("rivals")
    extras = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = {requirement.partition("==")[0] for requirement in extras["peers"]}
    assert all("==" in requirement for requirement in extras["peers"])
    operations = [o for make in rivals.OPERATIONS.values() for o in make(64)]
    used = {package for o in operations for peer in o.peers for package in peer.packages}
    assert used == pinned | {"jax"}
    for operation in operations:
        assert {name for peer in operation.peers for name in peer.against} == set(operation.ours)


def test_tables_show_times_failures_and_what_is_the_same():
    tables = importlib.import_module("peer_tables")
    case = {"part": "quantizers", "case": "NVFP4", "side": "quantize", "against": "torchao"}
    seconds = {"ratio": {"median": 0.5}, "ours": {"median": 0.002}, "theirs": {"median": 0.001}}
    told = seconds | {"error": {"ours": 0.09, "theirs": 0.1}, "same": {"codes": 1.0, "scales": 0.99999}}
    shared = "all of the codes, 99.9 % of the scales"
    assert tables.row(case | told) == ("NVFP4", "`quantize`", "torchao", "0.50x", "2", "1", "0.09, 0.1", shared)
    failed = case | {"failure": "not installed: torchao"}
    assert tables.row(failed) == ("NVFP4", "`quantize`", "torchao", "not installed: torchao", "", "", "", "")


def test_a_row_that_failed_gives_way_to_another_versions():
    tables = importlib.import_module("peer_tables")
    machine = {"device": "a CPU", "cores": 2, "python": "3.12", "commit": "abc"}

    def result(jax, *cases):
        return {"environment": machine | {"versions": {"jax": jax}}, "cases": {"avx2": list(cases)}}

    failed = {"part": "products", "case": "GEMM", "side": "MXFP8", "against": "jax.nn", "failure": "none for CPUs"}
    told = {"ratio": {"median": 0.5}, "ours": {"median": 0.002}, "theirs": {"median": 0.001}, "same": {}}
    runs = {k: v for k, v in failed.items() if k != "failure"} | told | {"error": {"ours": 0.09, "theirs": 0.1}}
    other = failed | {"against": "torch", "failure": "not installed: torch"}
    old, new = result("0.10.2", failed, other), result("0.12.0", runs)
    first, of_first, second, of_second = tables.tables([old, new], "products")
    assert "none for CPUs" not in first and "not installed: torch" in first and "jax 0.10.2" in of_first
    assert "0.50x" in second and "jax 0.12.0" in of_second
    assert "none for CPUs" in tables.tables([old], "products")[0]
    assert tables.tables([old, new], "decoding") == []


class TestChart:
    @pytest.fixture(autouse=True)
    def _result(self, tmp_path, monkeypatch):
        chart = importlib.import_module("charts.peers")
        ratio = {"ratio": {"median": 2.0}}
        rows = [row for rows in chart.PANELS.values() for row in rows]
        self.cases = [{"case": case, "side": side, "against": peer} | ratio for _, case, side, peer in rows]
        (tmp_path / "peers_avx2.json").touch()
        monkeypatch.setattr(chart, "RESULTS", tmp_path)
        monkeypatch.setattr(chart, "load", lambda name: {"cases": {"avx2": self.cases}})
        monkeypatch.setattr(chart, "measured_on", lambda *names: "measured here")
        self.drawn = lambda: chart.peers().drawn()

    def test_a_peer_that_failed_has_a_row_without_a_bar(self):
        assert self.drawn().count(">2.00x<") == len(self.cases)
        del self.cases[0]["ratio"]
        assert self.drawn().count(">2.00x<") == len(self.cases) - 1

    def test_a_case_that_was_not_measured_is_an_error(self):
        del self.cases[0]
        with pytest.raises(ValueError, match="the results have 0 cases 'NVFP4, rowwise"):
            self.drawn()


@pytest.mark.slow
def test_all_that_is_installed_is_measured_and_right(tmp_path):
    run_python(BENCHMARKS / "peers.py", "--divide", "16", "--quick", "--save", tmp_path)
    (file,) = tmp_path.glob("peers_*.json")
    result = json.loads(file.read_text())
    installed = {distribution.name for distribution in importlib.metadata.distributions()}
    (cases,) = result["cases"].values()
    assert {case["part"] for case in cases} == {"quantizers", "products", "decoding"}
    for case in cases:
        if "failure" in case and case["against"] != WITHOUT_CPU:
            assert case["failure"].startswith("not installed"), case
    for package in ("torchao", "qwix", "onnxruntime"):
        assert (package in installed) == (package in result["environment"]["versions"])
    exact = [c["same"] for c in cases if c["against"] == "torchao, compiled" and "FP" in c["case"] and "same" in c]
    assert exact == [{"codes": 1.0, "scales": 1.0}] * (4 if "torchao" in installed else 0)
