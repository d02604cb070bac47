"""What the ops become on NVIDIA GPUs, read off the lowered code: nothing here runs on one."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxlowprec as jlp
from jaxlowprec.ops.grouped_matmul.api import multiply_groups, multiply_within_groups, quantize_groups
from jaxlowprec.ops.grouped_matmul.weight_only import grouped_weight_only
from jaxlowprec.ops.scaled_matmul import cuda
from tests.cuda_without_gpu.claiming_cuda import claiming_cuda, custom_calls
from tests.cuda_without_gpu.gemm_calls import matmul_call, workspace_of
from tests.helpers import ONE_OF_EACH, assert_same_numbers, random_array

TILES = {"NVFP4": (16, 16), "MXFP8": (32, 32), "MXFP4": (32, 32), "Float8Block": (128, 128)}


def up(n, multiple):
    return -(-n // multiple) * multiple


def decoded(m, k, n):
    return sum(up(2 * rows * k, 256) for rows in (m, n))


def rebased(m, k, n):
    """Codes of 8 bits and a float32 for 128 of them."""
    return sum(up(rows * up(k, 128) // 128 * 132, 256) for rows in (m, n))


def swizzled(m, k, n, block):
    return sum(up(rows, 128) * up(-(-k // block), 4) for rows in (m, n))


class TestEveryOp:
    @pytest.mark.parametrize("fmt", ONE_OF_EACH, ids=str)
    def test_quantise_dequantise(self, fmt):
        """The same calls as on the CPU: operands, results and attributes."""

        def run(x):
            row, column = jlp.quantize_both(x, fmt, rounding="stochastic", key=jax.random.key(0))
            return row.dequantize(), column

        x = jnp.ones((2, 48, 80), jnp.bfloat16)
        with claiming_cuda():
            calls = custom_calls(run, x)
        amax = ["jaxlowprec_amax"] * fmt.has_tensor_scale + ["jaxlowprec_line_amaxes"] * (fmt.scaling == "rows")
        assert [call.target for call in calls] == [*amax, "jaxlowprec_quantize", "jaxlowprec_dequantize"]
        quantise, dequantise = calls[-2:]
        assert quantise.operands[0] == "2x48x80xbf16" and dequantise.results == ["2x48x80xbf16"]
        assert len(quantise.results) == 4
        for attribute in (f'element = "{fmt.element}"', f'scaling = "{fmt.scaling}"', f"block = {fmt.length} : i32"):
            assert attribute in quantise.attributes and attribute in dequantise.attributes

    @pytest.mark.parametrize("recipe", [jlp.Int8RowScaling(), jlp.Float8RowScaling()], ids=lambda r: type(r).__name__)
    def test_rows_in_groups(self, recipe):
        """Rows are quantised where they are, columns in slots of 128 rows, by the amaxes of all of a group's slots."""
        x, w, sizes = jnp.ones((32, 64), jnp.bfloat16), jnp.ones((2, 64, 48)), jnp.array([20, 5], jnp.int32)

        def step(x, w):
            return jax.grad(lambda x, w: jlp.grouped_matmul(x, w, sizes, recipe=recipe).sum(), (0, 1))(x, w)

        def quantised(rowwise, columnwise):
            fmt = recipe.roles().operands("wgrad")[0].format
            options = {"rowwise": rowwise, "columnwise": columnwise, "implementation": "ffi"}
            calls = custom_calls(lambda x: quantize_groups(x, sizes, fmt, **options), x)
            return [call.target.removeprefix("jaxlowprec_") for call in calls], [call.operands for call in calls]

        with claiming_cuda(9.0):
            calls = [call for call in custom_calls(step, x, w) if call.target != "jaxlowprec_amax"]  # for random bits
            assert {call.target for call in calls} == {
                f"jaxlowprec_{of}" for of in ("line_amaxes", "quantize", "scaled_matmul")
            }
            assert quantised(True, False) == (["quantize"], [["32x64xbf16"]])
            amaxes, in_slots = ["2x128xf32", "2x64xf32"], "2x128x64xbf16"
            both = [[in_slots], [in_slots, *amaxes]]
            assert quantised(True, True) == (["line_amaxes", "quantize"], both)
            assert quantised(False, True) == (["line_amaxes", "quantize"], [[in_slots], [in_slots, amaxes[1]]])

    def test_hadamard(self):
        with claiming_cuda():
            (call,) = custom_calls(lambda x: jlp.hadamard_transform(x, axis=-2, size=32), jnp.ones((64, 48)))
        assert (call.target, call.operands, call.results) == ("jaxlowprec_hadamard", ["64x48xf32"], ["64x48xf32"])
        assert "vertical = true" in call.attributes

    def test_without_cuda_all_is_the_reference(self):
        assert custom_calls(lambda x: jlp.quantize(x, jlp.NVFP4()), jnp.ones((16, 16))) == []


class TestRoutes:
    """Compute capability and formats decide the workspace."""

    M, K, N = 64, 512, 96

    def workspace(self, a, b, capability):
        return workspace_of(matmul_call(a, b, self.M, self.K, self.N, capability))

    @pytest.mark.parametrize("fmt", [jlp.NVFP4(), jlp.MXFP4(), jlp.MXFP8(), jlp.MXFP8(element="e5m2")], ids=str)
    def test_below_blackwell_codes_are_decoded(self, fmt):
        other = jlp.MXFP8() if fmt.element == "e5m2" else fmt
        for capability in (8.0, 8.9, 9.0)[: 2 if fmt == jlp.MXFP4() else None]:
            assert self.workspace(fmt, other, capability) == decoded(self.M, self.K, self.N)

    def test_on_hopper_mxfp4_is_rebased(self):
        one, two = jlp.MXFP4(), jlp.MXFP4((32, 32))
        for pair in itertools.product((one, two), repeat=2):
            assert self.workspace(*pair, 9.0) == rebased(self.M, self.K, self.N)
            assert workspace_of(matmul_call(*pair, 3, 160, 16, 9.0)) == rebased(16, 160, 16)
        assert self.workspace(one, jlp.MXFP8(), 9.0) == decoded(self.M, self.K, self.N)

    @pytest.mark.parametrize("power", [True, False])
    def test_by_fp8_blocks_mxfp4_alone_becomes_another(self, power):
        """Its codes and scales on Hopper, where the others' scales lie in order; as an MX format's on Blackwell."""
        a = jlp.Float8Block(power_of_two=power)
        for b in (jlp.MXFP4(), jlp.MXFP4((32, 32))):
            for call in (matmul_call(a, b, self.M, self.K, self.N, 9.0), matmul_call(a, b, 3, 160, 33, 9.0)):
                (rows, depth), (columns, _) = (map(int, re.findall(r"\d+(?=x)", call.operands[i])) for i in (0, 2))
                assert workspace_of(call) == up(columns * depth // 128 * 132, 256)
                assert rows >= 16 and rows % 4 == 0 and depth % 128 == 0
            if power:
                assert self.workspace(a, b, 8.0) == decoded(self.M, self.K, self.N)
                assert self.workspace(a, b, 10.0) == swizzled(self.M, self.K, self.N, 32) + self.N * self.K

    def test_on_blackwell_scales_are_swizzled(self):
        for capability in (10.0, 12.0):
            assert self.workspace(jlp.NVFP4(), jlp.NVFP4((16, 16)), capability) == swizzled(self.M, self.K, self.N, 16)
            assert self.workspace(jlp.MXFP8(), jlp.MXFP8(), capability) == swizzled(self.M, self.K, self.N, 32)

    def test_on_blackwell_mxfp4_is_widened(self):
        """E2M1 codes become E4M3 codes; the other operand's stay where they are."""
        scales, m, n = swizzled(self.M, self.K, self.N, 32), self.M * self.K, self.N * self.K
        for capability in (10.0, 12.0):
            assert self.workspace(jlp.MXFP8(), jlp.MXFP4(), capability) == scales + n
            assert self.workspace(jlp.MXFP4((32, 32)), jlp.MXFP8("e5m2"), capability) == scales + m
            assert self.workspace(jlp.MXFP4(), jlp.MXFP4(), capability) == scales + m + n

    def test_fp8_blocks(self):
        """On Hopper scales are multiplied where they lie, but for those of tiles that are padded to fours."""
        one, two = jlp.Float8Block(), jlp.Float8Block(block=(128, 128))
        assert self.workspace(one, one, 9.0) == self.workspace(one, two, 9.0) == self.workspace(two, one, 9.0) == 0
        assert workspace_of(matmul_call(one, two, self.M, 640, self.N, 9.0)) == up(4 * 8, 256)
        assert self.workspace(one, two, 8.0) == decoded(self.M, self.K, self.N)
        assert self.workspace(one, two, 10.0) == swizzled(self.M, self.K, self.N, 32)

    @pytest.mark.parametrize("k", [32, 96])
    def test_small_fp8_blocks_have_room_to_be_decoded(self, k):
        """On Hopper, where cuBLASLt may have no algorithm for them. Other scales are not exact in bfloat16."""
        for power, expected in ((True, decoded(self.M, k, self.N)), (False, 0)):
            fmt = jlp.Float8Block(power_of_two=power)
            assert workspace_of(matmul_call(fmt, fmt, self.M, k, self.N, 9.0)) == expected

    def test_fp8_tensors(self):
        fmt = jlp.Float8Tensor()
        assert [self.workspace(fmt, fmt, c) for c in (8.9, 9.0, 10.0)] == [0, 0, 0]
        assert self.workspace(fmt, fmt, 8.0) == decoded(self.M, self.K, self.N)

    @pytest.mark.parametrize("fmt", [jlp.NVFP4(), jlp.Float8Block(), jlp.Float8Tensor()], ids=str)
    def test_exported_code_has_room_for_any_gpu(self, fmt):
        known = max(self.workspace(fmt, fmt, c) for c in (8.0, 8.9, 9.0, 10.0, 12.0))
        assert self.workspace(fmt, fmt, None) == known


class TestFloatScalesThatAreNoPowersOfTwo:
    FMT = jlp.Float8Block(power_of_two=False)

    def lower(self, capability, implementation, weight=FMT, rows=32):
        a, b = (jlp.quantize(jnp.ones((n, 250)), fmt) for n, fmt in ((rows, self.FMT), (33, weight)))
        with claiming_cuda(capability):
            return custom_calls(lambda a, b: jlp.scaled_matmul(a, b, implementation=implementation), a, b)

    def test_hopper_multiplies_them(self):
        for options in ({}, {"weight": jlp.MXFP4()}, {"weight": jlp.MXFP4((32, 32)), "rows": 3}):
            assert len(self.lower(9.0, "ffi", **options)) == len(self.lower(9.0, None, **options)) == 1

    @pytest.mark.parametrize("capability", [8.0, 8.9, 10.0, 12.0])
    def test_other_gpus_take_the_reference_and_say_why(self, capability):
        for weight in (self.FMT, jlp.MXFP4()):
            assert self.lower(capability, None, weight) == []
            with pytest.raises(
                NotImplementedError, match="scaled_matmul: .*not powers of two.*quantise with power_of_two=True"
            ):
                self.lower(capability, "ffi", weight)

    def test_a_gpu_without_bfloat16_tensor_cores(self):
        assert self.lower(7.5, None) == []
        with pytest.raises(NotImplementedError, match="below compute capability 8.0"):
            self.lower(7.5, "ffi")


class TestOperands:
    @pytest.mark.parametrize("a,b", [(jlp.NVFP4(), jlp.NVFP4((16, 16))), (jlp.NVFP4((16, 16)), jlp.NVFP4())], ids=str)
    def test_even_sizes_go_as_they_are(self, a, b):
        call = matmul_call(a, b, 64, 128, 96, 9.0, (2,))
        a_scales, b_scales = ("4x8" if a.tiles else "64x8"), ("6x8" if b.tiles else "96x8")
        codes = ["2x64x64xui8", f"2x{a_scales}xf8E4M3FN", "2x96x64xui8", f"2x{b_scales}xf8E4M3FN"]
        assert call.operands == [*codes, "2x2xf32"]  # alpha and beta of each slice
        assert call.results[0] == "2x64x96xbf16"

    def test_odd_sizes_are_padded(self):
        call = matmul_call(jlp.NVFP4(), jlp.NVFP4((16, 16)), 5, 40, 33, 9.0)
        assert call.operands == ["5x32xui8", "5x4xf8E4M3FN", "48x32xui8", "3x4xf8E4M3FN", "2xf32"]
        call = matmul_call(jlp.MXFP8(), jlp.MXFP4(), 5, 40, 33, 9.0)
        assert call.operands == ["5x64xf8E4M3FN", "5x2xf8E8M0FNU", "48x32xui8", "48x2xf8E8M0FNU"]
        call = matmul_call(jlp.MXFP4(), jlp.MXFP4((32, 32)), 5, 40, 33, 9.0)
        assert call.operands == ["16x32xui8", "16x2xf8E8M0FNU", "48x32xui8", "2x2xf8E8M0FNU"]
        for options in ({"capability": 8.9}, {"capability": 9.0, "precision": "highest"}):
            call = matmul_call(jlp.MXFP4(), jlp.MXFP4(), 5, 40, 33, **options)
            assert call.operands[:2] == ["5x32xui8", "5x2xf8E8M0FNU"]
        call = matmul_call(jlp.Float8Block(), jlp.Float8Block(block=(128, 128)), 5, 130, 33, 9.0)
        assert call.operands == ["16x160xf8E4M3FN", "16x2xf32", "48x160xf8E4M3FN", "1x2xf32"]
        for capability in (9.0, 8.9):
            call = matmul_call(jlp.Float8Block(), jlp.MXFP4((32, 32)), 5, 130, 33, capability)
            assert call.operands == ["16x256xf8E4M3FN", "16x2xf32", "48x128xui8", "2x8xf8E8M0FNU"]
        call = matmul_call(jlp.Float8Block(), jlp.MXFP4(), 5, 130, 33, 10.0)
        assert call.operands == ["16x256xf8E4M3FN", "16x8xf8E8M0FNU", "48x128xui8", "48x8xf8E8M0FNU"]
        call = matmul_call(jlp.Float8Block(), jlp.Float8Block(block=(128, 128)), 17, 130, 33, 9.0)
        assert call.operands == ["20x160xf8E4M3FN", "20x2xf32", "48x160xf8E4M3FN", "1x2xf32"]
        call = matmul_call(jlp.Float8Tensor(), jlp.Float8Tensor(element="e5m2"), 5, 130, 33, 9.0)
        assert call.operands == ["5x160xf8E4M3FN", "f32", "48x160xf8E5M2", "f32", "2xf32"]
        assert call.results[0] == "5x48xbf16"

    @pytest.mark.parametrize("fmt", ONE_OF_EACH, ids=str)
    def test_every_format_lowers(self, fmt):
        other = type(fmt)() if fmt.element == "e5m2" else fmt
        for capability, sizes in itertools.product((8.0, 9.0, 10.0), [(1, 32, 16), (130, 300, 70)]):
            assert matmul_call(
                type(fmt)() if fmt.tiles and fmt.scaling == "float32" else fmt, other, *sizes, capability
            )

    def test_scales_of_rows(self):
        """The kernels have them in float32, whatever the weight's are; int32 sums are made beside the result."""
        integers, floats = jlp.Int8Rows(scale_dtype="bfloat16"), jlp.Float8Rows(scale_dtype="float16")
        for capability in (8.0, 9.0, 10.0):
            call = matmul_call(jlp.Int8Rows(), integers, 5, 130, 33, capability)
            assert call.operands == ["8x160xi8", "8x1xf32", "48x160xi8", "48x1xf32"]
            assert call.results[0] == "8x48xbf16" and workspace_of(call) == up(4 * 8 * 48, 256)
        call = matmul_call(jlp.Float8Rows(), floats, 5, 130, 33, 9.0)
        assert call.operands == ["8x160xf8E4M3FN", "8x1xf32", "48x160xf8E4M3FN", "48x1xf32"]
        assert call.results[0] == "8x48xbf16" and workspace_of(call) == 0
        call = matmul_call(jlp.Float8Rows(), floats, 5, 130, 33, 10.0)
        assert workspace_of(call) == up(4 * 8 * 48, 256)

    def test_nothing_to_multiply_needs_no_kernel(self):
        a = jlp.quantize(jnp.zeros((16, 0)), jlp.NVFP4())
        with claiming_cuda(9.0):
            assert custom_calls(lambda a: jlp.scaled_matmul(a, a), a) == []


class TestEpilogue:
    """What cuBLASLt does in exactly the order of numerics.md 9 it does; else it returns the float32 sum."""

    A, B = jlp.NVFP4(), jlp.NVFP4((16, 16))

    def call(self, n=96, **options):
        return matmul_call(self.A, self.B, 64, 128, n, 9.0, **options)

    @pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float32])
    def test_sums_are_accumulated_in_the_gemm(self, out_dtype):
        name = {"bfloat16": "bf16", "float32": "f32"}[jnp.dtype(out_dtype).name]
        call = self.call(accumulate=jnp.ones((64, 96), out_dtype), preferred_element_type=out_dtype)
        assert call.operands[-2:] == ["2xf32", f"64x96x{name}"] and call.results[0] == f"64x96x{name}"
        assert "accumulate = true" in call.attributes

    @pytest.mark.parametrize(
        "options",
        [
            {"bias": jnp.ones(96)},
            {"activation": "gelu"},
            {"activation": "dgelu", "activation_input": jnp.ones((64, 96))},
            {"accumulate": jnp.ones((64, 96)), "activation": "gelu"},
            {"accumulate": jnp.ones((64, 96)), "preferred_element_type": jnp.bfloat16},
            {"preferred_element_type": jnp.float16},
        ],
        ids=lambda options: "-".join(options),
    )
    def test_the_rest_is_done_in_float32_by_xla(self, options):
        call = self.call(**options)
        assert call.results[0] == "64x96xf32" and call.operands[-1] == "2xf32"
        assert "accumulate = false" in call.attributes

    def test_sums_of_odd_width_too(self):
        call = self.call(n=90, accumulate=jnp.ones((64, 90), jnp.bfloat16))
        assert call.results[0] == "64x96xf32"


class TestFP8BlocksAsMX:
    """On Blackwell, where the scales are powers of two."""

    @pytest.mark.parametrize("element", ["e4m3", "e5m2"])
    @pytest.mark.parametrize("block", [(1, 128), (128, 128)])
    @pytest.mark.parametrize("shape", [(4, 128), (40, 160), (2, 130, 320)], ids=str)
    def test_they_stand_for_the_same_numbers(self, shape, block, element):
        x = np.asarray(random_array(shape, "float32", 3)) * np.exp2(np.arange(shape[-1], dtype=np.float32) / 8 - 20)
        x[..., 1, 2] = np.nan

        @jax.jit
        def both(x):
            q = jlp.quantize(x, jlp.Float8Block(element, block))
            scale, fmt = cuda._as_mxfp8(q.scale, q.format, *shape[-2:])
            return dataclasses.replace(q, scale=scale, format=fmt).dequantize(), q.dequantize()

        same, numbers = both(x)
        assert_same_numbers(same, numbers)
        assert np.isnan(same).any()

    def test_the_gemm_gets_them(self):
        one, two = jlp.Float8Block(), jlp.Float8Block("e5m2", (128, 128))
        call = matmul_call(one, two, 64, 160, 144, 10.0)
        assert call.operands == ["64x160xf8E4M3FN", "64x5xf8E8M0FNU", "144x160xf8E5M2", "5x5xf8E8M0FNU"]
        assert call.attributes.count('scaling = "e8m0"') == 2 and call.attributes.count("block = 32") == 2
        call = matmul_call(one, two, 64, 160, 144, 9.0)
        assert call.operands == ["64x160xf8E4M3FN", "64x2xf32", "144x160xf8E5M2", "2x2xf32"]
        assert call.attributes.count('scaling = "float32"') == 2


def test_symbolic_shapes_take_the_reference_and_say_why():
    """The workspace is a size in bytes."""
    a = jax.eval_shape(lambda: jlp.quantize(jnp.zeros((16, 64)), jlp.NVFP4()))
    m, _ = export.symbolic_shape("m, 64")
    a = dataclasses.replace(
        a,
        data=jax.ShapeDtypeStruct((m, 32), jnp.uint8),
        scale=jax.ShapeDtypeStruct((m, 4), jnp.float8_e4m3fn),
        matrix_shape=(m, 64),
    )

    def lowered(implementation):
        function = jax.jit(lambda a: jlp.scaled_matmul(a, a, implementation=implementation))
        return export.export(function, platforms=("cuda",))(a).mlir_module()

    with claiming_cuda():
        assert "@jaxlowprec" not in lowered(None)
        with pytest.raises(NotImplementedError, match="shapes are symbolic"):
            lowered("ffi")


class TestSlices:
    """Activations [batch, time, features], which ops take in slices and merge for the kernels."""

    recipe = jlp.NVFP4BlockScaling()

    def calls(self, shape, capability):
        x, w = jnp.ones((*shape, 128), jnp.bfloat16), jnp.ones((128, 64))

        def step(x, w):
            y, pullback = jax.vjp(lambda x, w: jlp.linear(x, w, recipe=self.recipe), x, w)
            return y, *pullback(y)

        with claiming_cuda(capability):
            return custom_calls(step, x, w)

    @pytest.mark.parametrize("capability", [8.0, 9.0, 10.0])
    def test_kernels_see_tokens(self, capability):
        calls = self.calls((4, 32), capability)
        assert calls == self.calls((128,), capability)
        assert [call.target for call in calls].count("jaxlowprec_scaled_matmul") == 3

    def test_what_has_no_gemm_runs_by_reference(self, monkeypatch):
        monkeypatch.setattr(cuda, "why_not", lambda *_: "none here")
        targets = {call.target for call in self.calls((4, 32), 9.0)}
        assert "jaxlowprec_quantize" in targets and "jaxlowprec_scaled_matmul" not in targets


class TestGrouped:
    """Rows in groups: each 128 rows of a group are a matrix to the kernels that quantise, each chunk to the GEMM's."""

    SIZES = jnp.array([130, 0, 100, 70], jnp.int32)
    ROWS, GROUPS = 300, 4
    SLOTS = ROWS // 128 + GROUPS

    def quantise(self, fmt, stochastic, implementation="ffi"):
        def run(x, words):
            rotation = jlp.Hadamard() if isinstance(fmt, jlp.NVFP4) else None
            given = {"hadamard": rotation, "words": words if stochastic else None}
            return quantize_groups(
                x, self.SIZES, fmt, rowwise=True, columnwise=True, implementation=implementation, **given
            )

        with claiming_cuda(9.0):
            return custom_calls(run, jnp.ones((self.ROWS, 48), jnp.bfloat16), jnp.zeros((self.GROUPS, 2), jnp.uint32))

    @pytest.mark.parametrize("fmt", [f for f in ONE_OF_EACH if not f.tiles and f.scaling != "rows"], ids=str)
    def test_quantising(self, fmt):
        amax = ["jaxlowprec_amax"] * fmt.has_tensor_scale
        calls = self.quantise(fmt, False)
        assert [call.target for call in calls] == [*amax, "jaxlowprec_quantize"]
        assert {call.operands[0] for call in calls} == {f"{self.SLOTS}x128x48xbf16"}
        assert calls == self.quantise(fmt, False, None)
        assert calls[-1].operands[1:] == [f"{self.SLOTS}xf32"] * 2 * fmt.has_tensor_scale
        assert f"rotate_columns = {str(isinstance(fmt, jlp.NVFP4)).lower()}" in calls[-1].attributes

    def test_each_slot_has_its_groups_key_and_its_own_indices(self):
        call = self.quantise(jlp.MXFP4(), True)[-1]
        rows, columns = [f"{self.SLOTS}x128xui32", "1x3xui32"], ["1x48xui32", f"{self.SLOTS}x8xui32"]
        indices = [operand.removeprefix("1x") for operand in rows + columns]
        assert call.operands[1:] == [f"{self.SLOTS}x2xui32", *indices]

    def test_batches_are_more_slots(self):
        def run(x, sizes):
            return quantize_groups(x, sizes, jlp.NVFP4(), rowwise=True, columnwise=False)

        with claiming_cuda(9.0):
            calls = custom_calls(run, jnp.ones((2, 300, 48)), jnp.stack([self.SIZES, self.SIZES]))
        assert [call.operands[0] for call in calls] == ["2x6x128x48xf32"] * 2

    def test_a_training_step(self):
        def step(x, w):
            y, pullback = jax.vjp(
                lambda x, w: jlp.grouped_matmul(x, w, self.SIZES, recipe=jlp.NVFP4BlockScaling()), x, w
            )
            return y, *pullback(y)

        x, w = jnp.ones((self.ROWS, 64), jnp.bfloat16), jnp.ones((self.GROUPS, 64, 32))
        with claiming_cuda(9.0):
            calls = custom_calls(step, x, w)
        assert [call.target for call in calls].count("jaxlowprec_quantize") == 3  # x, w, dy
        assert [call.target for call in calls].count("jaxlowprec_scaled_matmul") == 3  # y, dx, dw
        assert {call.target for call in calls} == {f"jaxlowprec_{of}" for of in ("amax", "quantize", "scaled_matmul")}

    @pytest.mark.parametrize("implementation", [None, "ffi"])
    def test_products(self, implementation):
        """Of chunks of 128 rows; the gradient of the weights is added to."""
        row, column = jax.eval_shape(
            lambda: quantize_groups(jnp.ones((self.ROWS, 64)), self.SIZES, jlp.NVFP4(), rowwise=True, columnwise=True)
        )
        w = jax.eval_shape(lambda: jlp.quantize(jnp.ones((self.GROUPS, 32, 64)), jlp.NVFP4()))
        with claiming_cuda(9.0):
            (rows,) = custom_calls(lambda a, b: multiply_groups(a, b, None, jnp.float32, implementation), row, w)
            (wgrad,) = custom_calls(lambda a: multiply_within_groups(a, a, jnp.float32, implementation), column)
        assert rows.target == wgrad.target == "jaxlowprec_scaled_matmul"
        assert rows.operands[:4] == ["128x32xui8", "128x4xf8E4M3FN", "32x32xui8", "32x4xf8E4M3FN"]
        assert wgrad.operands[:4] == ["64x64xui8", "64x8xf8E4M3FN"] * 2 and wgrad.operands[-1] == "64x64xf32"
        assert "accumulate = true" in wgrad.attributes

    def test_weight_only(self):
        """Few rows by the kernel that decodes in registers; of many that is not demanded."""

        def run(rows, implementation):
            w = jax.eval_shape(lambda: jlp.quantize(jnp.ones((self.GROUPS, 32, 64)), jlp.NVFP4()))
            x = jnp.ones((rows, 64), jnp.bfloat16)
            with claiming_cuda(9.0):
                return custom_calls(
                    lambda x, w: grouped_weight_only(x, w, self.SIZES, None, jnp.float32, implementation), x, w
                )

        (call,) = run(60, "ffi")
        assert call.target == "jaxlowprec_weight_only_matmul" and call.operands[0] == "16x64xbf16"
        assert run(60, None) == [call] and run(self.ROWS, None) == []
        with pytest.raises(NotImplementedError, match="implementation=None XLA multiplies"):
            run(self.ROWS, "ffi")
