"""Training steps compiled for TPUs that are not there: of layers under each recipe, of a Llama block, of layers on four
chips, which XLA partitions itself. Skipped without libtpu."""

import collections

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from tests.cuda_without_gpu.test_described_block import TOKENS, WIDTH, Fused
from tests.sharding.meshes import mesh_of
from tests.tpu_without_tpu.described_tpu import RAGGED_CODES, by_tpu, compiled, devices_of

SIZE = 256
BF16 = ("bf16", "bf16")
OURS = "/jaxlowprec_"  # in JAX's names of what an op of this library consists of
RECIPES = {
    "fp8_current": jlp.Float8CurrentScaling(),
    "mxfp8": jlp.MXFP8BlockScaling(),
    "fp8_block": jlp.Float8BlockScaling(),
    "nvfp4": jlp.NVFP4BlockScaling(),
}
PRODUCTS = dict.fromkeys(RECIPES, {BF16: 3}) | {
    "fp8_current": {("f8e4m3fn", "f8e4m3fn"): 1, ("f8e5m2", "f8e4m3fn"): 2},  # gradients are E5M2
}


def array(*shape, dtype="bfloat16", sharding=None):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)


def counted(program):
    """How many products of which operands, in either order."""
    return collections.Counter(tuple(sorted(types, reverse=True)) for types in program.products())


def step_of(layer):
    """The result of a layer of some arguments, and its gradients for a gradient of the result."""

    def step(dy, *args):
        y, pullback = jax.vjp(layer, *args)
        return y, pullback(dy)

    return step


class TestLinear:
    @pytest.mark.sampled(2)
    @by_tpu
    @pytest.mark.parametrize("name", RECIPES)
    def test_three_products(self, name, tpu):
        step = step_of(lambda x, w: jlp.linear(x, w, recipe=RECIPES[name]))
        x, w = array(SIZE, SIZE), array(SIZE, SIZE, dtype="float32")
        found = compiled(step, x, x, w, devices=devices_of(tpu))
        assert found.faults == []
        assert counted(found) == PRODUCTS[name]

    @by_tpu
    def test_delayed_scaling(self, tpu):
        recipe = jlp.DelayedScaling(amax_history_len=4)
        state = jax.eval_shape(lambda: jlp.delayed_scaling.init_state(recipe))
        step = step_of(lambda x, w, state: jlp.linear(x, w, recipe=recipe, state=state))
        x, w = array(SIZE, SIZE), array(SIZE, SIZE, dtype="float32")
        found = compiled(step, (x, state), x, w, state, devices=devices_of(tpu))
        assert found.faults == []
        assert counted(found) == PRODUCTS["fp8_current"]


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_block"])
def test_memory_of_a_large_step(name):
    """Codes of three arrays both ways, and two operands of a product in bfloat16: no float32 scale of an element."""
    n = 2048
    step = step_of(lambda x, w: jlp.linear(x, w, recipe=RECIPES[name]))
    found = compiled(step, array(n, n), array(n, n), array(n, n, dtype="float32"), devices=devices_of("7x"))
    assert found.temporary_bytes < (6 + 2 * 2) * n * n
    assert counted(found) == {BF16: 3}


@by_tpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8_current", "mxfp8"])
def test_rows_in_groups(name, tpu):
    """Rows are gathered into chunks for what is quantised along them, and the product of the kernels' gradients loops
    over these chunks."""

    def step(dy, x, w, sizes):
        y, pullback = jax.vjp(lambda x, w: jlp.grouped_matmul(x, w, sizes, recipe=RECIPES[name]), x, w)
        return y, pullback(dy)

    x, w, sizes = array(SIZE, SIZE), array(4, SIZE, SIZE), array(4, dtype="int32")
    found = compiled(step, x, x, w, sizes, devices=devices_of(tpu))
    assert [fault for fault in found.faults if not fault.startswith(("gather", "loop"))] == []
    of_rows = {RAGGED_CODES[tpu] if name == "fp8_current" else BF16}
    within_groups = {("f8e5m2", "f8e4m3fn") if name == "fp8_current" else BF16}
    assert set(counted(found)) == of_rows | within_groups


@by_tpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_a_block(name, tpu):
    """Norms and an activation, quantised as they are made, among five linears. Attention is JAX's own: its softmax
    divides, and its products have operands of their own."""
    with jlp.autocast(RECIPES[name]):
        graph, parameters = nnx.split(nnx.eval_shape(lambda: Fused(nnx.Rngs(0), "quantized")), nnx.Param)
        x = array(*TOKENS, WIDTH)
        step = step_of(lambda parameters, x: nnx.merge(graph, parameters)(x))
        found = compiled(step, x, parameters, x, devices=devices_of(tpu))
    assert [fault for fault in found.faults if OURS in fault] == []
    assert not found.loops and not found.gathers
    assert found.products(OURS) == [BF16] * 3 * 5


MESHES = {  # specs of x, the kernel and y
    "column": (P("x", None), P(None, "x"), P(None, "x")),
    "row": (P(None, "x"), P("x", None), P("x", None)),
}
GATHERED = {  # what travels, by XLA's choice: x for a column's fprop and wgrad, dy for a row's dgrad and wgrad
    "fp8_current": {"column": "f8e4m3fn", "row": "f8e5m2"},
    "mxfp8": {"column": "bf16", "row": "bf16"},  # not codes
}


@by_tpu
@pytest.mark.sampled(3)
@pytest.mark.parametrize("parallel", MESHES)
@pytest.mark.parametrize("name", GATHERED)
def test_four_chips(name, parallel, tpu):
    """Under jit, where libtpu has no custom partitioning: XLA partitions what an op consists of, and adds up in
    float32."""
    mesh = mesh_of((4,), names="x", devices=devices_of(tpu))
    of_x, of_w, of_y = (NamedSharding(mesh, spec) for spec in MESHES[parallel])
    x, dy = array(SIZE, 4 * SIZE, sharding=of_x), array(SIZE, 4 * SIZE, sharding=of_y)
    w = array(4 * SIZE, 4 * SIZE, dtype="float32", sharding=of_w)
    step = step_of(lambda x, w: jlp.linear(x, w, recipe=RECIPES[name]))
    found = compiled(step, dy, x, w, devices=mesh.devices, out_shardings=(of_y, (of_x, of_w)))
    assert found.faults == []
    assert counted(found) == PRODUCTS[name]
    assert {i.dtype for i in found.of_kind("all-gather")} == {GATHERED[name][parallel]}
    assert {i.dtype for i in found.of_kind("reduce-scatter", "all-reduce") if i.shape != "[]"} == {"f32"}
