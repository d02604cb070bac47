"""What is wrong with a run, in words."""

import dataclasses
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from jaxlowprec.ops.statistics.finish import LENGTH, SCALARS
from jaxlowprec.telemetry.limits import Limits, _usual, findings
from jaxlowprec.telemetry.measures import Statistics, of_gemm
from jaxlowprec.telemetry.recording import Record, Run

HEALTHY = {"uses": 1, "underflow": 0.1, "square_error": 0.01, "amax": 3, "rms": 1}


def statistics(**numbers):
    values = np.zeros(LENGTH)
    for name, value in (HEALTHY | numbers).items():
        values[SCALARS.index(name)] = value
    return Statistics(values)


def a_run(*layers, losses=()):
    """A run whose records, ten steps apart, have these layers."""
    losses = [*losses, *[1.0] * (len(layers) - len(losses))]
    records = [Record(10 * i, 0.0, {"loss": loss}, of) for i, (of, loss) in enumerate(zip(layers, losses, strict=True))]
    return Run(pathlib.Path("telemetry.jsonl"), {}, records)


def of_one(*numbers, tensor="gradient rowwise"):
    """A run of one layer with such numbers in its records."""
    return a_run(*({"up": {tensor: statistics(**given)}} for given in numbers))


def test_a_healthy_run_has_none():
    assert findings(of_one({}, {}, {})) == []
    assert findings(a_run()) == []


@pytest.mark.parametrize(
    ("numbers", "statistic", "words"),
    [
        ({"underflow": 0.41}, "underflow", "41 % underflow since step 10; rotate it"),
        ({"saturation": 0.2}, "saturation", "20 % are cut off since step 10; its scale is too small"),
        ({"floor": 0.6}, "floor", "60 % of the blocks have the smallest scale since step 10"),
        ({"bias": -0.06}, "bias", "rounding shifts the sum by -6 % since step 10; round it stochastically"),
        ({"square_error": 0.1}, "sqnr", "the SQNR is 10.0 dB, over the run 10.0 dB since step 10"),
        ({"nonfinite": 1e-6}, "nonfinite", "0.0001 % of the elements are infinite or NaN since step 10"),
        ({"poisoned": 0.5}, "poisoned", "50 % of the elements are lost to an infinite or NaN neighbour"),
    ],
)
def test_each_says_what_where_since_when_and_what_to_do(numbers, statistic, words):
    (found,) = findings(of_one({}, numbers, numbers))
    assert (found.layer, found.tensor, found.statistic, found.since) == ("up", "gradient rowwise", statistic, 10)
    assert found.text.startswith("gradient rowwise of up: ") and words in found.text


def test_a_gemm_has_a_limit_of_its_own():
    def layer(error):
        return {"up": {"dgrad": of_gemm([1, error])}}

    assert findings(a_run(layer(0.1), layer(0.1))) == []
    (found,) = findings(a_run(layer(0.1), layer(0.1), layer(0.3)))
    assert found.text.startswith("dgrad of up: the SQNR of the result is 5.2 dB, over the run 10.0 dB since step 20; ")


def test_a_gemm_may_fall_to_what_its_operands_errors_let_expect():
    """Errors of 0.01 in each operand make one of 0.02, 17 dB, unless the product averages them out."""
    both = {name: statistics(square_error=0.01) for name in ("input columnwise", "gradient columnwise")}

    def layer(error):
        return {"up": {**both, "wgrad": of_gemm([1, error])}}

    early = [layer(0.0025)] * 3  # 26 dB
    assert findings(a_run(*early, layer(0.0112))) == []  # 19.5 dB
    assert findings(a_run(*early, layer(0.0790))) == []  # 11.02 dB, 6 below what is expected
    (found,) = findings(a_run(*early, layer(0.0800)))
    assert "the SQNR of the result is 11.0 dB, over the run 26.0 dB since step 30" in found.text


def test_of_two_records_the_usual_is_between_them():
    """A step whose gradient is a few times the history that delayed scaling has for it: 16 dB after one of 25.5."""
    usual, once = {"square_error": 10**-2.55}, {"square_error": 10**-1.6}
    assert findings(of_one(usual, once)) == findings(of_one(once, usual)) == []
    (found,) = findings(of_one(usual, usual, once))
    assert found.text.startswith("gradient rowwise of up: the SQNR is 16.0 dB, over the run 25.5 dB since step 20")


def test_the_usual_is_the_median_of_what_is_finite():
    rng = np.random.default_rng(0)
    for records in range(1, 8):
        sqnr = np.where(rng.random((records, 50)) < 0.3, np.inf, rng.normal(20, 5, (records, 50)))
        sqnr[:, 0] = np.inf
        for column, usual in zip(sqnr.T, _usual(sqnr), strict=True):
            finite = column[np.isfinite(column)]
            assert usual == (np.median(finite) if finite.size else -np.inf)


def test_layers_have_the_findings_that_each_has_alone():
    rng = np.random.default_rng(48)
    names = ["input columnwise", "gradient columnwise", "wgrad", "input columnwise, mxfp8"]

    def made(name):
        if name == "wgrad":
            return of_gemm([1, rng.choice([0, 0.002, 0.3, np.nan])])
        share = rng.choice([0.0, 0.001, 0.6], 6)
        numbers = dict(
            zip(("underflow", "saturation", "nonfinite", "floor", "bias", "square_error"), share, strict=True)
        )
        return statistics(**numbers, rms=float(rng.choice([0, 1e-6, 1, 1e6])))

    layers = [
        {
            f"blocks/{i}": {name: made(name) for name in names if rng.random() < 0.8}
            for i in range(40)
            if rng.random() < 0.9
        }
        for _ in range(6)
    ]
    together, alone = findings(a_run(*layers)), []
    for layer in layers[-1]:
        alone += findings(a_run(*({layer: found[layer]} if layer in found else {} for found in layers)))
    assert sorted(map(repr, together)) == sorted(map(repr, alone))
    assert {f.statistic for f in alone} >= {"underflow", "saturation", "nonfinite", "floor", "bias", "sqnr", "rms"}


def test_what_is_over_is_none():
    assert findings(of_one({}, {"underflow": 0.9}, {})) == []


def test_since_is_the_latest_unbroken_time():
    bad = {"underflow": 0.9}
    (found,) = findings(of_one(bad, {}, bad, bad))
    assert found.since == 20


@pytest.mark.parametrize(("outlier", "found"), [(3e5, []), (1e6, ["floor", "underflow"])])
def test_an_outlier_counts_where_it_costs_other_elements(outlier, found):
    """E4M3 scales span 2^18: an element so large puts blocks at the smallest scale, and one a little larger their
    elements at zero."""
    x = np.random.default_rng(0).normal(size=(128, 128))
    x[3, 5] = outlier

    def output(w):
        return jlp.linear(
            jnp.asarray(x, jnp.bfloat16), w, recipe=jlp.NVFP4BlockScaling(disable_rht=True), name="up"
        ).sum()

    w = np.random.default_rng(1).normal(size=(128, 32)).astype(np.float32)
    _, measured = jax.jit(jlp.telemetry.value_and_grad(output))(w)
    layer = {"up": {"input rowwise": jlp.telemetry.read(measured)["up"]["input rowwise"]}}
    assert layer["up"]["input rowwise"].floor > 0.3
    assert sorted(f.statistic for f in findings(a_run(layer))) == found


def test_gradients_fall_in_the_first_steps():
    fallen = {"rms": 2.0**-9, "amax": 2.0**-7}
    assert findings(of_one({}, {}, fallen, fallen)) == []
    for of, tensor in (
        (of_one(fallen, {}, {}), "gradient rowwise"),
        (of_one({}, fallen, tensor="input rowwise"), "input rowwise"),
    ):
        (found,) = findings(of)
        assert (found.statistic, found.tensor) == ("rms", tensor)


def test_a_change_by_orders_of_magnitude():
    shrunk = {"rms": 2.0**-20, "amax": 2.0**-18}
    (found,) = findings(of_one({}, {}, shrunk, shrunk))
    assert (found.statistic, found.since) == ("rms", 20) and "fell by 2^20, to 9.5e-07, since step 20" in found.text
    assert findings(of_one({}, shrunk, {}, {})) == []
    assert findings(of_one({}, {"rms": 0.1, "amax": 0.3})) == []


def test_a_loss_that_is_not_finite():
    (found,) = findings(a_run({}, {}, {}, losses=[1.0, math.nan, math.inf]))
    assert (found.statistic, found.since, found.severity) == ("loss", 10, 2)


def test_the_remedy_is_what_was_measured_to_help_most():
    layer = {
        "gradient columnwise": statistics(underflow=0.5),
        "gradient columnwise, mxfp8": statistics(underflow=0.001),
        "gradient columnwise, rotated": statistics(underflow=0.09),
    }
    (found,) = findings(a_run({"up": layer}))
    assert found.text.endswith("50 % underflow since step 0; mxfp8 would bring it to 0 %")


def test_the_worst_come_first():
    run = a_run({"a": {"input rowwise": statistics(underflow=0.5)}, "b": {"input rowwise": statistics(nonfinite=0.1)}})
    assert [found.layer for found in findings(run)] == ["b", "a"]


def test_limits_are_the_readers():
    run = of_one({"underflow": 0.3})
    assert findings(run) == []
    assert [found.statistic for found in findings(run, dataclasses.replace(Limits(), underflow=0.2))] == ["underflow"]


def test_names_of_a_megabyte_make_no_long_finding():
    layers = {"a" * 1_000_000: {"gradient rowwise": statistics(nonfinite=0.5)}}
    record = Record(0, 0.0, {"b" * 1_000_000: math.inf}, layers)
    found = findings(Run(pathlib.Path("telemetry.jsonl"), {}, [record]))
    assert len(found) == 2 and all(len(finding.text) < 500 for finding in found)
