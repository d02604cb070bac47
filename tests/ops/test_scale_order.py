"""In which calls scales lie column by column on NVIDIA GPUs, read off the lowered code: nothing here runs on one."""

import re

import jax
import jax.numpy as jnp
import pytest

import jaxlowprec as jlp
from jaxlowprec.ops.activations.quantized import quantized_activation, quantized_activation_gradients
from jaxlowprec.ops.grouped_matmul.api import quantize_groups
from jaxlowprec.ops.norms.op import NormSpec
from jaxlowprec.ops.norms.quantized import quantized_norm
from tests.cuda_without_gpu.claiming_cuda import claiming_cuda, custom_calls

ROWS, TILES = jlp.Float8Block(), jlp.Float8Block(block=(128, 128))
X = jnp.ones((2, 96, 256), jnp.bfloat16)
BY_ROWS, BY_COLUMNS = [2, 1, 0], [1, 2, 0]  # of three axes, the innermost first


def layouts(call, of):
    """Of a call's operands or results, those of arrays of three axes, in order."""
    listed = re.search(rf"{of}_layouts = \[(.*?dense.*?)\](?:, \w|$)", call.attributes)[1]
    found = [[int(n) for n in re.findall(r"\d+", axes)] for axes in re.findall(r"dense<(.*?)> :", listed)]
    return [axes for axes in found if len(axes) == 3]


def lowered(function, *args, capability=9.0):
    with claiming_cuda(capability):
        return custom_calls(function, *args)


class TestQuantisers:
    def test_both_ways(self):
        (call,) = lowered(lambda x: jlp.quantize_both(x, ROWS), X)
        assert layouts(call, "result") == [BY_ROWS, BY_COLUMNS] * 2
        assert layouts(call, "operand") == [BY_ROWS]
        assert "column_major = true" in call.attributes

    @pytest.mark.parametrize("fmt", [TILES, jlp.MXFP8(), jlp.Float8Tensor()], ids=str)
    def test_other_formats(self, fmt):
        call = lowered(lambda x: jlp.quantize(x, fmt), X)[-1]
        assert BY_COLUMNS not in layouts(call, "result") and "column_major" not in call.attributes

    @pytest.mark.parametrize("capability", [None, 8.0, 8.9, 10.0, 12.0])
    def test_other_gpus(self, capability):
        """And exported programs, which may run on any."""
        (call,) = lowered(lambda x: jlp.quantize(x, ROWS), X, capability=capability)
        assert layouts(call, "result") == [BY_ROWS] * 2 and "column_major" not in call.attributes

    def test_producers(self):
        def norm(x):
            return quantized_norm(NormSpec("rms", 1e-6, False, False), ROWS, x, jnp.ones(256))[:2]

        def activation(x):
            return quantized_activation("swiglu", ROWS, (x, x))

        def gradients(x):
            return quantized_activation_gradients("swiglu", ROWS, x, (x, x))

        for function, results in ((norm, 2), (activation, 2), (gradients, 4)):
            (call,) = lowered(function, X)
            assert layouts(call, "result") == [BY_ROWS, BY_COLUMNS] * results
            assert "column_major = true" in call.attributes

    def test_rows_in_groups_are_gathered_by_rows(self):
        def run(x):
            return quantize_groups(x, jnp.array([90, 6], jnp.int32), ROWS, rowwise=True, columnwise=True)

        (call,) = lowered(run, X[0])
        assert BY_COLUMNS not in layouts(call, "result") and "column_major" not in call.attributes


class TestGEMMs:
    def call(self, a, b, capability=9.0, **options):
        a, b = (jax.eval_shape(lambda fmt=fmt: jlp.quantize(X, fmt)) for fmt in (a, b))
        (call,) = lowered(lambda a, b: jlp.scaled_matmul(a, b, **options), a, b, capability=capability)
        return call

    @pytest.mark.parametrize(("a", "b"), [(ROWS, ROWS), (ROWS, TILES), (TILES, ROWS)], ids=str)
    def test_each_operand_of_rows(self, a, b):
        call = self.call(a, b)
        order = {ROWS: BY_COLUMNS, TILES: BY_ROWS}
        assert layouts(call, "operand") == [BY_ROWS, order[a], BY_ROWS, order[b]]
        assert call.attributes.count("column_major = true") == (a == ROWS) + (b == ROWS)

    def test_padded_rows(self):
        """XLA's padding writes the order that the GEMM reads."""
        a, b = (jax.eval_shape(lambda n=n: jlp.quantize(jnp.ones((2, n, 256)), ROWS)) for n in (17, 33))
        (call,) = lowered(jlp.scaled_matmul, a, b)
        assert call.operands[1] == "2x20x2xf32" and call.operands[3] == "2x48x2xf32"
        assert layouts(call, "operand") == [BY_ROWS, BY_COLUMNS] * 2

    @pytest.mark.parametrize("capability", [None, 8.0, 10.0])
    def test_other_gpus(self, capability):
        call = self.call(ROWS, ROWS, capability)
        assert BY_COLUMNS not in layouts(call, "operand") and "column_major" not in call.attributes

    @pytest.mark.parametrize("capability", [None, 8.0, 9.0, 10.0])
    @pytest.mark.parametrize("weight", [jlp.Int4(64), jlp.MXFP4((32, 32))], ids=str)
    def test_weights_of_integers_by_4_bits(self, weight, capability):
        call = self.call(jlp.Int8Rows(), weight, capability)
        assert layouts(call, "operand") == [BY_ROWS] * 3 + [BY_COLUMNS]
        assert call.attributes.count("column_major = true") == 1

    def test_decoded_operands(self):
        """Kernels that decode read scales row by row."""
        call = self.call(ROWS, TILES, precision="highest")
        assert BY_COLUMNS not in layouts(call, "operand") and "column_major" not in call.attributes
