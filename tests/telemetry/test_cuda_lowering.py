"""What telemetry becomes on NVIDIA GPUs, read off the lowered code: nothing here runs on one."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import export

import jaxlowprec as jlp
from jaxlowprec.ops.statistics import finish, reference
from jaxlowprec.ops.statistics.op import moments_op, outliers_op, ragged_of, statistics_op, sums_op
from jaxlowprec.telemetry.measures import statistics
from jaxlowprec.wiring import native
from tests.cuda_without_gpu.claiming_cuda import claiming_cuda, custom_calls
from tests.helpers import COUNTED

OURS = {f"jaxlowprec_{name}" for name in ("moments", "outliers", "sums", "statistics")}
PARTS = 1024  # of the matrices of a batch together, and one more for each: xla_ffi/cuda/statistics/parts.h


def one_call(op, *args):
    with claiming_cuda():
        (call,) = custom_calls(op, *args)
    return call


class TestEveryOp:
    def test_moments_have_a_workspace(self):
        call = one_call(lambda x: moments_op("ffi")(x), jnp.ones((3, 5, 40, 70), jnp.bfloat16))
        assert call.target == "jaxlowprec_moments" and call.operands == ["3x5x40x70xbf16"]
        assert call.results == ["3x5x2xf32", f"{(PARTS + 15) * 16}xui8"]

    def test_outliers_have_none(self):
        call = one_call(lambda x, t: outliers_op("ffi")(x, t), jnp.ones((2, 40, 70), jnp.float16), jnp.ones(2))
        assert call.target == "jaxlowprec_outliers"
        assert (call.operands, call.results) == (["2x40x70xf16", "2xf32"], ["2x70xi32"])

    @pytest.mark.parametrize("axis", [-1, -2])
    @pytest.mark.parametrize("fmt", COUNTED, ids=str)
    def test_sums_of_every_format(self, fmt, axis):
        x = jnp.ones((48, 80), jnp.bfloat16)
        q = jax.eval_shape(lambda: jlp.quantize(x, fmt, axis=axis))
        leaves = [leaf for leaf in (q.data, q.scale, q.amax) if leaf is not None]
        with claiming_cuda():
            op = sums_op(fmt, axis == -2, ragged_of(fmt, x.shape, axis == -2), "ffi")
            (call,) = custom_calls(lambda *args: op(*args), x, jnp.float32(1), *leaves)
        assert call.target == "jaxlowprec_sums" and len(call.operands) == 2 + len(leaves)
        assert call.results == [f"{reference.LENGTH}xf32", f"{(PARTS + 1) * 8 * reference.LENGTH}xui8"]
        assert f"columnwise = {str(axis == -2).lower()}" in call.attributes
        assert f'scaling = "{fmt.scaling}"' in call.attributes

    def test_sums_of_rows_have_no_kernel(self):
        with pytest.raises(NotImplementedError, match="scales of rows are counted in pure JAX: there is no kernel"):
            sums_op(jlp.Int8Rows(), False, (True, False), "ffi")

    def test_vectors(self):
        sums, known, channels = jnp.ones((2, reference.LENGTH)), jnp.ones(2), jnp.ones((2, 2 * finish.CHANNELS))
        with claiming_cuda():
            op = statistics_op(("two_level", "e8m0"), "ffi")
            (call,) = custom_calls(lambda *args: op(*args), sums, known, known, known, channels)
        assert call.target == "jaxlowprec_statistics" and call.results == [f"2x{finish.LENGTH}xf32"]
        assert 'scalings = "two_level e8m0"' in call.attributes

    def test_the_workspace_follows_a_symbolic_batch(self):
        (shape,) = (jax.ShapeDtypeStruct(export.symbolic_shape("b, 40, 70"), jnp.float32),)
        allowed = [export.DisabledSafetyCheck.custom_call("jaxlowprec_moments")]
        with claiming_cuda():
            function = jax.jit(lambda x: moments_op("ffi")(x))
            text = export.export(function, platforms=("cuda",), disabled_checks=allowed)(shape).mlir_module()
        assert "@jaxlowprec_moments" in text

    def test_the_bytes_of_the_workspaces_are_the_librarys(self):
        of_moments, of_sums = native.library().module.cuda_statistics_workspaces()
        assert of_moments == ((PARTS + 1) * 16, 16)
        assert of_sums == ((PARTS + 1) * 8 * reference.LENGTH, 8 * reference.LENGTH)


def test_one_tensor_is_measured_by_the_kernels():
    x = jnp.ones((64, 64), jnp.bfloat16)
    with claiming_cuda():
        text = (
            jax.jit(lambda x: statistics(x, jlp.quantize(x, jlp.NVFP4())).values)
            .trace(x)
            .lower(lowering_platforms=("cuda",))
            .as_text()
        )
    assert set(re.findall(r"@(jaxlowprec_\w+)\(", text)) >= OURS


# --- the steps that are not measured


def targets(module, *, within_case):
    """The library's custom calls that the program makes; `within_case`: also those that only a branch makes."""
    functions = {function.attributes["sym_name"].value: function for function in module.body.operations}
    found, seen = set(), set()

    def visit(op):
        name = op.operation.name
        if name == "stablehlo.custom_call":
            found.add(op.operation.attributes["call_target_name"].value)
        elif name == "func.call":
            callee = op.operation.attributes["callee"].value
            if callee not in seen:
                seen.add(callee)
                visit(functions[callee])
        elif name == "stablehlo.case" and not within_case:
            return
        for region in op.operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    visit(inner)

    visit(functions["main"])
    return {target for target in found if target.startswith("jaxlowprec_")}


def test_a_step_that_is_not_measured_calls_none_of_the_kernels():
    """They are in a branch of the program, behind a barrier: without one XLA computes both branches on a GPU."""
    recipe = jlp.NVFP4BlockScaling(disable_stochastic_rounding=True)  # random bits have branches of their own

    def loss(params, x):
        return jlp.linear(x, params, recipe=recipe, name="up").astype(jnp.float32).sum()

    def step(params, x, on):
        return jlp.telemetry.value_and_grad(loss, on=on)(params, x)

    args = (jnp.ones((32, 64)), jnp.ones((64, 32), jnp.bfloat16), True)
    with claiming_cuda(9.0):
        lowered = jax.jit(step).trace(*args).lower(lowering_platforms=("cuda",))
        module, text = lowered.compiler_ir("stablehlo"), lowered.as_text()
        everything, always = (targets(module, within_case=within) for within in (True, False))
    assert everything >= OURS and "jaxlowprec_scaled_matmul" in always
    assert not always & OURS
    branches = text.count("stablehlo.case")
    assert branches and text.count("stablehlo.optimization_barrier") >= branches
