"""accumulate_gradients gives the gradients of jax.value_and_grad wherever a kernel's contracted axes are, and whatever
transformation its layer is in."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec.layers import delayed_scaling
from tests.flax.libraries import numbers
from tests.helpers import random_array
from tests.low_precision import STRUCTURES, state_for
from tests.models.test_accumulation import calls, squared, under

PARTS, SIZE = 2, 16  # all axes of kernels are equally long: no wrong order of them is an error


def orders_of(batch, contracted, features):
    """A layer's einsum, with each order of its kernel's axes; first the one contracted last."""
    orders = sorted(itertools.permutations(f"{batch}{features}{contracted}"), key=lambda axes: axes[-1] != "k")
    return [f"{batch}t{contracted},{''.join(axes)}->{batch}t{features}" for axes in orders]


LAYOUTS = [
    *(orders_of("", "k", "n") + orders_of("", "kl", "n") + orders_of("", "k", "nm") + orders_of("b", "k", "n")),
    *("tk,kkn->tn", "tk,nkr->tn", "tk,k...->t...", "tkl,nlk->nt", "tb,bnk->bn"),  # a diagonal, a sum, results turned
]


def chosen():
    """Each structure once; with --slow each layout once, too, and with --every-case each layout with each structure."""
    for (i, layout), (j, name) in itertools.product(enumerate(LAYOUTS), enumerate(STRUCTURES)):
        turn, place = divmod(i, len(STRUCTURES))
        marks = pytest.mark.every_case if place != j else () if turn == j % 2 else pytest.mark.slow
        yield pytest.param(layout, STRUCTURES[name], marks=marks, id=f"{layout}-{name}")


def by_parts(loss):
    """What accumulate_gradients gives, and the mean of jax.value_and_grad of the parts, in one program."""

    @jax.jit
    def run(params, x):
        parts = jnp.stack([x[i::PARTS] for i in range(PARTS)])
        each = jax.lax.map(lambda part: jax.value_and_grad(loss)(params, part), parts)

        def combined(path, values):
            return values.max(axis=0) if delayed_scaling.is_state(path) else values.sum(axis=0) / PARTS

        return jlp.accumulate_gradients(loss, microbatches=PARTS)(params, x), jax.tree_util.tree_map_with_path(
            combined, each
        )

    return run


def assert_gradients(loss, params, x):
    assert_alike(*by_parts(loss)(params, x))


def assert_alike(found, wanted):
    """XLA adds up losses, and what a layout sums or spreads, in an order of its own."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(wanted[1]))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * np.abs(b).max())


@pytest.mark.parametrize(("layout", "recipe"), list(chosen()))
def test_gradients_do_not_depend_on_a_kernels_layout(layout, recipe):
    of_input, of_kernel = layout.partition("->")[0].replace("...", "nm").split(",")
    x = random_array((PARTS, *(SIZE for _ in of_input)), jnp.bfloat16)
    params = {"kernel": random_array(tuple(SIZE for _ in of_kernel), "float32", 1)}
    state = None if recipe is None else state_for(recipe)
    if state is not None:
        params[delayed_scaling.OVERWRITE_WITH_GRADIENT] = state

    def loss(params, x):
        state = params.get(delayed_scaling.OVERWRITE_WITH_GRADIENT)
        y = jlp.einsum(layout, x[0], params["kernel"], state=state)
        return squared(y if state is None else y[0])

    with under(recipe):
        assert_gradients(loss, params, x)


def functions(params, x):
    """Of jax.lax and jnp: a weight of torch's layout on each side, and one with axes for heads."""
    heads = jnp.einsum("td,dnh->tnh", x, params["heads"])
    y = jnp.einsum("tnh,nhd->td", heads, params["joined"]) @ params["right"].T
    return squared(jnp.einsum("nd,td->nt", params["left"], y))


def experts(params, x):
    sizes = jnp.array([3, 0, x.shape[0] - 4])  # and one row in no group
    y = jlp.grouped_matmul(x, params["experts"], sizes, name="plain")
    return squared(jlp.ragged_dot(y, params["turned"].mT, sizes))


KERNELS = {
    "heads": random_array((64, 4, 16), "float32", 1),
    "joined": random_array((4, 16, 64), "float32", 2),
    "right": random_array((64, 64), "float32", 3),
    "left": random_array((64, 64), "float32", 4),
    "experts": random_array((3, 64, 64), "float32", 5),
    "turned": random_array((3, 64, 64), "float32", 6),
}
BOTH = ("left", "right")
ROWS = random_array((PARTS * 16, 64), jnp.bfloat16)
RECIPE = jlp.MXFP8BlockScaling()


def of_kernels(loss, *names):
    return loss, {name: KERNELS[name] for name in names}


def test_of_functions_and_experts():
    for loss, params in (
        of_kernels(jlp.quantize_matmuls(functions, RECIPE), "heads", "joined", "right", "left"),
        of_kernels(experts, "experts", "turned"),
    ):
        with jlp.autocast(RECIPE, strict=None):
            assert_gradients(loss, params, ROWS)


@pytest.mark.slow
def test_of_flaxs_attention():
    x = random_array((PARTS * 2, 8, 64), jnp.bfloat16)
    attention = nnx.eval_shape(lambda: nnx.MultiHeadAttention(4, 64, decode=False, rngs=nnx.Rngs(0)))
    graph, params, rest = nnx.split(jlp.nnx.convert(attention, RECIPE), nnx.Param, ...)
    rest = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), rest)
    module = jlp.linen.convert(nn.MultiHeadDotProductAttention(4), RECIPE)
    variables = jax.eval_shape(module.init, jax.random.key(0), x)
    assert_gradients(lambda params, x: squared(nnx.merge(graph, params, rest)(x)), numbers(params), x)
    assert_gradients(lambda variables, x: squared(module.apply(variables, x)), numbers(variables), x)


def test_kernels_of_every_layout_are_quantised_once():
    def loss(params, x):
        return jlp.quantize_matmuls(functions, RECIPE)(params, x) + squared(jlp.einsum("td,fd->ft", x, params["row"]))

    with jlp.autocast(RECIPE, strict=None):
        found = calls(loss, KERNELS | {"row": KERNELS["left"] + 1}, ROWS, "jaxlowprec_quantize")
    assert found[1] == 4  # of five: `right` is transposed before


def in_a_scan(w, x):
    return jax.lax.scan(lambda x, _: (jlp.linear(x, w) * 0.1, None), x, length=3)[0]


def in_vmap(w, x):
    return jax.vmap(lambda row: jlp.linear(row, w))(x)


def in_a_branch(w, x):
    return jax.lax.cond(x[0, 2] > 1, lambda x: jlp.linear(x, w), lambda x: x, x)  # only of the first part


def in_jit(w, x):
    return jax.jit(lambda x: jlp.linear(x, w) + (w**2).mean())(x)


def in_checkpoint(w, x):
    return jax.checkpoint(lambda x: jlp.linear(x, w) + w[0])(x)


def in_shard_map(w, x):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.P("data")
    return jax.shard_map(lambda x: jlp.linear(x, w), mesh=mesh, in_specs=split, out_specs=split)(x)


def stopped(w, x):
    return jlp.linear(x, jax.lax.stop_gradient(w))


@pytest.mark.parametrize("layer", [in_a_scan, in_vmap, in_a_branch, in_jit, in_checkpoint, in_shard_map, stopped])
def test_a_layer_may_close_over_its_kernel_in_a_transformation(layer):
    loss, params = of_kernels(lambda params, x: squared(layer(params["right"], jlp.linear(x, params["left"]))), *BOTH)
    with jlp.autocast(RECIPE):
        assert_gradients(loss, params, ROWS)


def test_one_array_may_be_in_two_places():
    loss, params = of_kernels(
        lambda params, x: squared(jlp.linear(jlp.linear(x, params["left"]), params["right"])), *BOTH
    )

    @jax.jit
    def tied(kernel, x):
        return jlp.accumulate_gradients(loss, microbatches=PARTS)(dict.fromkeys(BOTH, kernel), x)

    with jlp.autocast(RECIPE):
        found = tied(params["left"], ROWS)
        wanted = by_parts(loss)(dict.fromkeys(BOTH, params["left"]), ROWS)[1]
    assert_alike(found, wanted)
