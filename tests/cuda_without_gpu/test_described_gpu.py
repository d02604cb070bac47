"""XLA's compiler for NVIDIA GPUs takes what is here: every op, whole training steps, several GPUs. Nothing runs.

Without JAX's CUDA plugin, or GPU kernels in the library, these tests are skipped.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jaxlowprec as jlp
from tests.cuda_without_gpu.described_gpu import GPUS, compiled, described
from tests.gpu.test_training import RECIPES, SIZES, LanguageModel, Schedule, make_steps, optimizer, recipe_context
from tests.helpers import ONE_OF_EACH
from tests.layers.grouped.test_grouped import RECIPES as GROUPED_RECIPES
from tests.sharding.meshes import mesh_of

NOT_RUN_ON_THE_SIDE = ("copy", "transpose")  # of whole arrays, between the custom calls


@pytest.fixture(params=GPUS)
def devices(request):
    with described(request.param) as found:
        yield found


class TestOps:
    @pytest.mark.parametrize("fmt", ONE_OF_EACH, ids=str)
    def test_quantise_and_back(self, devices, fmt):
        """One pass after the amax, and no other work but to transpose scales that were written for Hopper's GEMM."""

        def run(x):
            q = jlp.quantize(x, fmt)
            return q, q.dequantize()

        found = compiled(run, jnp.ones((256, 512), jnp.bfloat16), devices=devices)
        calls = ["quantize", "dequantize", *["amax"] * fmt.has_tensor_scale]
        assert found.calls == {f"jaxlowprec_{call}": 1 for call in calls}
        transposed = fmt == jlp.Float8Block() and "H100" in devices[0].device_kind
        assert found.kinds["fusion"] == found.kinds["transpose"] == transposed and not found.kinds["copy"]

    def test_rows_with_amaxes_of_their_own(self, devices):
        """One pass, which finds the amaxes."""
        rows = jlp.NVFP4(row_scaled=True)
        found = compiled(lambda x: jlp.quantize(x, rows), jnp.ones((256, 512), jnp.bfloat16), devices=devices)
        assert found.calls == {"jaxlowprec_row_scaled_quantize": 1}
        assert not found.kinds["fusion"] and not any(found.kinds[kind] for kind in NOT_RUN_ON_THE_SIDE)

    @pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
    def test_both_ways_rotated(self, devices, rounding):
        def run(x, key):
            return jlp.quantize_both(
                x,
                jlp.NVFP4(),
                hadamard_columnwise=True,
                rounding=rounding,
                key=key if rounding == "stochastic" else None,
            )

        found = compiled(run, jnp.ones((256, 512)), jnp.zeros(2, jnp.uint32), devices=devices)
        assert found.calls == {"jaxlowprec_amax": 1, "jaxlowprec_quantize": 1}

    @pytest.mark.parametrize("fmt", [f for f in ONE_OF_EACH if not f.tiles and f.element != "e5m2"], ids=str)
    def test_scaled_matmul(self, devices, fmt):
        def run(a, b, bias):
            return jlp.scaled_matmul(
                jlp.quantize(a, fmt), jlp.quantize(b, fmt), bias, activation="gelu", preferred_element_type=jnp.bfloat16
            )

        a, b, bias = jnp.ones((128, 512)), jnp.ones((256, 512)), jnp.ones(256)
        found = compiled(run, a, b, bias, devices=devices)
        assert found.calls["jaxlowprec_scaled_matmul"] == 1
        assert not any(found.kinds[kind] for kind in ("dot", *NOT_RUN_ON_THE_SIDE))

    @pytest.mark.parametrize("fmt", [jlp.Int4(), jlp.Int4(32, symmetric=False)], ids=str)
    def test_int4(self, devices, fmt):
        def run(w):
            q = jlp.quantize(w, fmt, axis=-2)
            return q, q.dequantize(), jlp.fake_quantize(w, fmt, axis=-2)

        found = compiled(run, jnp.ones((256, 512), jnp.bfloat16), devices=devices)
        calls = ("quantize", "dequantize", "fake_quantize")
        assert found.calls == {f"jaxlowprec_int4_{call}": 1 for call in calls}

    @pytest.mark.parametrize("fmt", [jlp.Int4(), jlp.NVFP4()], ids=str)
    @pytest.mark.parametrize("rows", [8, 128])
    def test_weight_only(self, devices, fmt, rows):
        """Few rows by the kernel that decodes in registers, many by XLA's GEMM of the decoded weight."""

        def run(x, w):
            return jlp.scaled_matmul(x, jlp.quantize(w, fmt))

        x, w = jnp.ones((rows, 512), jnp.bfloat16), jnp.ones((256, 512), jnp.bfloat16)
        found = compiled(run, x, w, devices=devices)
        assert found.calls["jaxlowprec_weight_only_matmul"] == (rows <= 16)

    @pytest.mark.parametrize("axis", [-1, -2])
    def test_hadamard(self, devices, axis):
        found = compiled(
            lambda x: jlp.hadamard_transform(x, axis=axis, size=128), jnp.ones((256, 512)), devices=devices
        )
        assert found.calls == {"jaxlowprec_hadamard": 1}

    def test_producers(self, devices):
        def run(x, gamma):
            return jlp.swiglu(jlp.rms_norm(x, gamma), x)

        found = compiled(
            jax.value_and_grad(lambda x, g: run(x, g).sum()), jnp.ones((256, 512)), jnp.ones(512), devices=devices
        )
        calls = ("activation", "norm")
        assert found.calls == {f"jaxlowprec_{call}{of}": 1 for call in calls for of in ("", "_gradient")}


@pytest.mark.parametrize("name", [name for name in RECIPES if RECIPES[name]])
def test_a_training_step_of_the_demo(name):
    """All three GEMMs of a block's 4 linears are the library's. The MLP's activation is quantised again for wgrad.

    Where the format has no tensor scale, it and its gradient are quantised in the calls that make them.
    """
    config = dataclasses.replace(SIZES["demo"], layers=1, high_precision_last=0)
    transformation = optimizer(Schedule(20, 1e-3, 8, 0, 20))
    with described("H100") as devices, recipe_context(RECIPES[name]):
        graph, parameters = nnx.split(jax.eval_shape(lambda: LanguageModel(config, nnx.Rngs(0))), nnx.Param)
        state = jax.eval_shape(transformation.init, parameters)
        tokens = jax.ShapeDtypeStruct((8, config.context + 1), jnp.int32)
        step, _ = make_steps(graph, transformation)
        found = compiled(step, parameters, state, tokens, devices=devices)
    quantised = {call: count for call, count in found.calls.items() if call.endswith("quantize")}
    assert found.calls["jaxlowprec_scaled_matmul"] == sum(quantised.values()) - 1 == 3 * 4
    of_activation = {call: count for call, count in quantised.items() if "activation" in call}
    in_one_pass = {"jaxlowprec_activation_quantize": 2, "jaxlowprec_activation_gradient_quantize": 1}
    assert of_activation == (in_one_pass if name in ("mxfp8", "fp8_block") else {})


@pytest.mark.parametrize("spec", [PartitionSpec("x", None), PartitionSpec(None, "x")], ids=["tokens", "contraction"])
def test_several_gpus(spec):
    """Each has its part of x; where the contraction is split, partial sums are added up."""
    with described("H100", 4) as devices:
        mesh = mesh_of((len(devices),), names="x", devices=devices)
        kernel_spec = PartitionSpec("x", None) if spec[1] else PartitionSpec()
        x = jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        w = jax.ShapeDtypeStruct((1024, 256), jnp.float32, sharding=NamedSharding(mesh, kernel_spec))
        found = compiled(lambda x, w: jlp.linear(x, w, recipe=jlp.MXFP8BlockScaling()), x, w, devices=devices)
    assert found.calls["jaxlowprec_quantize"] == 2 and found.calls["jaxlowprec_scaled_matmul"] == 1
    local = "bf16[512,256]" if spec[1] else "bf16[128,1024]"
    assert re.search(
        rf'custom_call_target="jaxlowprec_quantize", operand_layout_constraints={{{re.escape(local)}', found.text
    )
    reduced = sum(n for kind, n in found.kinds.items() if kind.startswith(("all-reduce", "reduce-scatter")))
    assert bool(reduced) == bool(spec[1])


QUANTISED = {  # arrays in a training step where they are not all three: x, the weights and dy
    "high precision backward": 2,
    "dequantized backward": 2,
    "int4_qat": 1,
    "int4_qat clipped": 1,
    "nvfp4_qat 2d": 1,
    "dgrad only": 2,
}
MULTIPLIED = {
    "high precision forward": 2,
    "dgrad only": 1,
}  # products of quantised arrays, where that is not {3: 3, 2: 1} of those


@pytest.mark.parametrize("name", GROUPED_RECIPES)
def test_a_training_step_of_rows_in_groups(name):
    """Each array is quantised once, by the library's kernels. Three loops go over the groups, one a product, and copy
    no array that has all of them."""
    recipe = GROUPED_RECIPES[name]

    def step(x, w, bias, sizes, key):
        def layer(x, w, bias):
            return jlp.grouped_matmul(x, w, sizes, bias, recipe=recipe, key=key)

        y, pullback = jax.vjp(layer, x, w, bias)
        return y, *pullback(y)

    with described("H100") as devices:
        x, w, bias = jnp.ones((300, 256), jnp.bfloat16), jnp.ones((4, 256, 128)), jnp.ones((4, 128))
        found = compiled(step, x, w, bias, jnp.ones(4, jnp.int32), jnp.zeros(2, jnp.uint32), devices=devices)
    role = recipe.roles("grouped_linear", "").weight
    expected = QUANTISED.get(name, 3)
    int4 = role is not None and role.format.element == "int4"
    assert found.calls["jaxlowprec_int4_quantize" if int4 else "jaxlowprec_quantize"] == expected
    assert found.calls["jaxlowprec_amax"] == expected * (role is not None and role.format.has_tensor_scale)
    assert found.calls["jaxlowprec_scaled_matmul"] + found.kinds["dot"] == found.kinds["while"] == 3
    assert found.calls["jaxlowprec_scaled_matmul"] == MULTIPLIED.get(name, {3: 3, 2: 1}.get(expected, 0))
    bodies = re.findall(r"body=%([\w.-]+)", found.text)
    for body in bodies:
        (instructions,) = re.findall(rf"^%{re.escape(body)} .*?\n(.*?)^}}", found.text, re.MULTILINE | re.DOTALL)
        assert not re.search(r"\[4,\d+,\d+\]\S* (copy|transpose|select|convert)\(", instructions)


@pytest.mark.parametrize("spec", [PartitionSpec(None, None, "x"), PartitionSpec(None, "x", None)], ids=["n", "k"])
def test_rows_in_groups_on_several_gpus(spec):
    """Each multiplies its part of every group's weights; where the contraction is split, partial sums are added up."""
    with described("H100", 4) as devices:
        mesh = mesh_of((len(devices),), names="x", devices=devices)
        shape = lambda size, dtype, *spec: jax.ShapeDtypeStruct(  # noqa: E731
            size, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec))
        )
        x = shape((300, 1024), jnp.bfloat16, None, spec[1])
        w, sizes = shape((4, 1024, 256), jnp.float32, *spec), shape((4,), jnp.int32)
        recipe = jlp.MXFP8BlockScaling()
        found = compiled(
            lambda x, w, sizes: jlp.grouped_matmul(x, w, sizes, recipe=recipe), x, w, sizes, devices=devices
        )
    assert found.calls["jaxlowprec_scaled_matmul"] == found.kinds["while"] == 1
    local = "f8e4m3fn[64,1024]" if spec[2] else "f8e4m3fn[256,256]"
    call = next(line for line in found.text.splitlines() if 'custom_call_target="jaxlowprec_scaled_matmul"' in line)
    assert local in call
    reduced = sum(n for kind, n in found.kinds.items() if kind.startswith(("all-reduce", "reduce-scatter")))
    assert bool(reduced) == bool(spec[1])
