"""`jaxlowprec verify`: what it runs is right here, and what a device does wrong is found and named."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlowprec.cli.main import main
from jaxlowprec.diagnostics.verify import arithmetic, products, quantisers, verify
from jaxlowprec.diagnostics.verify.run import differences
from jaxlowprec.ops.quantize import reference
from jaxlowprec.ops.rounding import from_bits, magnitude_bits
from jaxlowprec.ops.scaled_matmul import portable
from tests.helpers import run_python

NVFP4 = "quantize NVFP4 1x16, nearest"


def verified(capsys, *arguments):
    status = main(["verify", *arguments])
    return status, capsys.readouterr().out


@pytest.fixture
def compiled_anew():
    """Programs of a faulty library are not those of others."""
    jax.clear_caches()
    yield
    jax.clear_caches()


class TestARightDevice:
    def test_every_item_is_ok_by_the_kernels(self, capsys, isa):
        status, said = verified(capsys)
        assert status == 0, said
        *items, summary = said.splitlines()
        assert all(line.startswith("ok       ") for line in items)
        assert summary.startswith(f"all {len(items)} items are as they must be (cpu, ")
        assert len(items) > 80

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "variable", [{"JAXLOWPREC_DISABLE_NATIVE": "1"}, {"JAXLOWPREC_IMPLEMENTATION": "portable"}]
    )
    def test_every_item_is_ok_in_pure_jax(self, variable):
        out = run_python("-m", "jaxlowprec.cli.main", "verify", **variable).stdout
        assert "DIFFERS" not in out and "items are as they must be" in out

    @pytest.mark.parametrize("implementation", ["reference", "portable"])
    @pytest.mark.parametrize("only", [NVFP4, "quantize MXFP8 E4M3 1x32, stochastic", "matmul NVFP4", "float32 mul"])
    def test_items_in_pure_jax(self, implementation, only):
        report = verify(only=only, implementation=implementation)
        assert report.results and report.ok, report

    def test_json(self, capsys):
        status, said = verified(capsys, "--json", "--only", "amax")
        found = json.loads(said)
        assert status == 0 and found["ok"] and found["device"] == "cpu"
        assert found["items"] == [{"item": "amax", "ok": True, "found": []}]


class TestAFault:
    @pytest.mark.usefixtures("compiled_anew")
    def test_a_division_off_by_one_ulp_is_located(self, monkeypatch, capsys):
        exact = reference.block_encode

        def off_by_one(scale, encode):
            return from_bits(magnitude_bits(exact(scale, encode)) + 1)

        monkeypatch.setattr(reference, "block_encode", off_by_one)
        status, said = verified(capsys, "--only", NVFP4, "--implementation", "reference")
        assert status == 1 and f"DIFFERS  {NVFP4}\n" in said
        assert "float32 rowwise codes: " in said and " of 589824 differ, first at [" in said
        assert "kernels)" in said and "1 of 1 items differ (cpu, " in said

    @pytest.mark.usefixtures("compiled_anew")
    def test_codes_by_unrounded_scales_are_found(self, monkeypatch):
        """What a compiler does that drops the cast of a scale to E4M3 and back."""
        exact = reference.block_encode

        def unrounded(scale, encode):
            return exact(scale * jnp.float32(1.01), encode)

        monkeypatch.setattr(reference, "block_encode", unrounded)
        report = verify(only="NVFP4 1x16 rotated, stochastic", implementation="portable")
        (result,) = report.results
        assert not report.ok and all(" codes: " in found for found in result.found)

    @pytest.mark.usefixtures("compiled_anew")
    def test_a_product_out_of_bounds_is_found(self, monkeypatch):
        exact = portable.decoded
        monkeypatch.setattr(portable, "decoded", lambda *args: exact(*args) * 1.0078125)
        report = verify(only="scaled_matmul MXFP8 E4M3 1x32 x MXFP8 E4M3 1x32", implementation="portable")
        assert not report.ok and "are out of bounds, first at [" in report.results[0].found[0]

    def test_arithmetic_that_rounds_otherwise_is_found(self, monkeypatch):
        monkeypatch.setitem(arithmetic.OPERATIONS, "multiply", _truncated_on_devices)
        (result,) = verify(only="float32 multiply").results
        assert not result.ok and "differ, first at [" in result.found[0]

    def test_a_program_that_fails_is_an_item_that_differs(self, monkeypatch):
        def fail(*_):
            raise RuntimeError("no such instruction")

        monkeypatch.setattr(quantisers, "_amaxes", fail)
        (result,) = verify(only="amax").results
        assert result.found == ("RuntimeError: no such instruction",)

    def test_without_a_cpu_it_says_how_to_see_elements(self, monkeypatch):
        everywhere = jax.local_devices

        def hidden(*, backend=None):
            if backend == "cpu":
                raise RuntimeError("Unknown backend cpu")
            return everywhere()

        monkeypatch.setattr(jax, "local_devices", hidden)
        monkeypatch.setattr(quantisers, "digest", lambda _: "0" * 16)
        report = verify(only="amax")
        assert "to see which elements" in report.compared_with
        assert "bfloat16: not the bytes whose digest is" in report.results[0].found[0]

    def test_the_first_difference_is_named(self):
        wanted = np.zeros((2, 3), np.float32)
        got = wanted.copy()
        got[1, 0] = 1.5
        assert differences("scales", wanted, wanted) == ""
        said = "scales: 1 of 6 differ, first at [1, 0]: got 1.5 (0x3fc00000), must be 0.0 (0x00000000)"
        assert differences("scales", got, wanted) == said
        assert "must be float32[2, 3]" in differences("scales", got[:1], wanted)


def _truncated_on_devices(x, y):
    if isinstance(x, np.ndarray):
        return x * y
    return from_bits(jax.lax.bitcast_convert_type(x * y, jnp.uint32) & jnp.uint32(0xFFFFFFFE))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--platform", "abacus"), "abacus"), (("--only", "float7"), "no item has that in its name")],
)
def test_bad_arguments_are_one_line(arguments, message, capsys):
    assert main(["verify", *arguments]) == 2
    assert message in capsys.readouterr().err


class TestBounds:
    """A product's bound is that of the way that multiplies it."""

    def test_exact_operands_have_the_bound_of_float32_sums(self):
        k = 512 * 2.0**-24
        pairs = {pair: products.sum_error(*pair, self.run_on("portable")) for pair in products.PAIRS}
        wider = {pair for pair, bound in pairs.items() if bound > k}
        assert wider == {pair for pair in pairs if pair[0].scaling == "float32" and not pair[0].power_of_two}
        assert all(bound == k + 8 * 2.0**-24 for pair, bound in pairs.items() if pair in wider)
        assert all(products.sum_error(*pair, self.run_on("ffi")) == k for pair in pairs)

    @staticmethod
    def run_on(implementation):
        return products.RunOn(jax.devices("cpu")[0], implementation)
