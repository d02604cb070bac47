"""accumulate_gradients: the mean of the parts' gradients, weights quantised once, sums in the GEMMs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec.layers import delayed_scaling
from tests.flax.libraries import numbers
from tests.helpers import assert_same_bytes, random_array
from tests.layers.fused.layers import weights
from tests.low_precision import recipes

K, F, PARTS = 64, 96, 4
X = random_array((16, 16, K), jnp.bfloat16)
PARAMS = {
    "gamma": random_array((K,), "float32", 1),
    "up": weights((K, F), 2),
    "down": weights((F, K), 3),
}
RECIPES = recipes(
    *("bf16", "nvfp4", "mxfp8", "int4_qat"), *("high precision forward", "high precision backward")
)  # delayed scaling: see below
NVFP4 = jlp.NVFP4BlockScaling()


def under(recipe):
    return jlp.autocast(recipe, enabled=recipe is not None)


def squared(y):
    return jnp.square(y.astype(jnp.float32)).mean()


def loss(params, x):
    h = jlp.rms_norm(x, params["gamma"])
    hidden = jlp.gelu(jlp.linear(h, params["up"], name="up"))
    return squared(jlp.linear(hidden, params["down"], name="down"))


def by_hand(loss, params, x, parts=PARTS):
    """The mean of the parts' losses and gradients."""
    step, x = jax.jit(jax.value_and_grad(loss)), np.asarray(x)
    found = [jax.device_get(step(params, x[i::parts])) for i in range(parts)]

    def mean(first, *others):
        total = np.float32(first)
        for other in others:
            total = total + np.float32(other)
        return (total / np.float32(parts)).astype(first.dtype)

    return jax.tree.map(mean, *found)


def assert_trees(found, wanted, exact=True):
    """Equal bits of kernels' gradients. XLA sums losses and the gradients of norms in an order of its own.

    Arguments:
        exact: whether kernels' gradients come from the GEMMs alone; otherwise XLA's arithmetic is among it.
    """
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if exact and b.ndim > 1:
            assert_same_bytes(a, b)
        else:
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * np.abs(b).max())


def calls(loss, params, x, name):
    """The native calls of this name within the loop over the parts, and before it; and those that add to a sum."""
    jaxpr = jax.make_jaxpr(jlp.accumulate_gradients(loss, microbatches=PARTS))(params, x).jaxpr
    (loop,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    within = list(primitives(loop.params["jaxpr"].jaxpr))
    before = [eqn for other in jaxpr.eqns if other is not loop for eqn in primitives_of(other)]
    named = [[eqn for eqn in where if name in str(eqn.primitive)] for where in (within, before)]
    return len(named[0]), len(named[1])


def primitives(jaxpr):
    for eqn in jaxpr.eqns:
        yield from primitives_of(eqn)


def primitives_of(eqn):
    yield eqn
    for value in eqn.params.values():
        inner = getattr(value, "jaxpr", value)
        if hasattr(inner, "eqns"):
            yield from primitives(inner)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
class TestBits:
    @pytest.mark.sampled(3)
    def test_are_those_of_the_mean_of_separate_steps(self, recipe):
        with under(recipe):
            assert_trees(
                jax.jit(jlp.accumulate_gradients(loss, microbatches=PARTS))(PARAMS, X), by_hand(loss, PARAMS, X)
            )

    @pytest.mark.sampled(3)
    def test_with_bfloat16_parameters(self, recipe):
        params = jax.tree.map(lambda p: np.asarray(p).astype(jnp.bfloat16), PARAMS)
        with under(recipe):
            found = jax.jit(jlp.accumulate_gradients(loss, microbatches=PARTS))(params, X)[1]
            # A part's gradient is not rounded to bfloat16 before it is added.
            wanted = by_hand(loss, params, X)[1]
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert a.dtype == b.dtype == jnp.bfloat16
            np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=2**-6, atol=2**-7 * np.abs(b).max())


def reused(params, x):
    return squared(jlp.linear(jlp.linear(x, params["up"] @ params["down"], name="a"), params["square"], name="b"))


def tied(params, x):
    return squared(jlp.linear(jlp.linear(x, params["square"], name="a"), params["square"], name="b"))


def cast(params, x):
    return squared(jlp.linear(x, params["up"].astype(jnp.bfloat16)))


def with_decay(params, x):
    return squared(jlp.linear(x, params["up"])) + jnp.square(params["up"]).mean()


def within_jit(params, x):
    return squared(jax.jit(jlp.linear)(x, params["up"]))


def checkpointed(params, x):
    return jax.checkpoint(loss)(params, x)


def in_a_scan(params, x):
    def layer(x, kernel):
        return jlp.linear(x, kernel), None

    return squared(jax.lax.scan(layer, x, params["stack"])[0])


def mlp(params, x):
    return squared(jlp.mlp(x, [params["up"], params["down"]], activation="gelu", saved="recompute"))


def several(params, x):
    a, b = jlp.linears(x, [params["up"], params["square"]], names=["a", "b"])
    return squared(a) + squared(b)


MODELS = [reused, tied, cast, with_decay, within_jit, checkpointed, in_a_scan, mlp, several]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", MODELS)
def test_whatever_reads_the_kernels(model):
    params = PARAMS | {"square": weights((K, K), 4), "stack": weights((3, K, K), 5)}
    with jlp.autocast(NVFP4):
        found = jax.jit(jlp.accumulate_gradients(model, microbatches=PARTS))(params, X)
        assert_trees(found, by_hand(model, params, X), exact=model not in (reused, with_decay))


class TestCalls:
    """Of two layers: three GEMMs each; x, kernel and gradient are quantised."""

    def test_kernels_are_quantised_before_the_loop(self):
        with jlp.autocast(NVFP4):
            assert calls(loss, PARAMS, X, "jaxlowprec_quantize") == (4, 2)

    def test_a_kernel_that_two_layers_read_is_quantised_by_each(self):
        with jlp.autocast(NVFP4):
            params = {"square": random_array((K, K), "float32", 4)}
            assert calls(tied, params, X, "jaxlowprec_quantize") == (6, 0)

    def test_sums_are_made_in_the_gemms(self):
        """No addition of arrays of a kernel's shape is left."""
        with jlp.autocast(NVFP4):
            jaxpr = jax.make_jaxpr(jlp.accumulate_gradients(loss, microbatches=PARTS))(PARAMS, X).jaxpr
        (loop,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
        added = [e.outvars[0].aval.shape for e in primitives(loop.params["jaxpr"].jaxpr) if e.primitive.name == "add"]
        assert (K,) in added
        assert not {(K, F), (F, K)} & set(added)


EXPERTS, HIDDEN = 4, 32
OF_EXPERTS = {
    "gate": weights((EXPERTS, K, HIDDEN), 6),
    "up": weights((EXPERTS, K, HIDDEN), 7),
    "down": weights((EXPERTS, HIDDEN, K), 8),
}


def sizes_for(x):
    """Of 64 rows, different for each part; one group may be empty, and some rows are in none."""
    first = jnp.int32(jnp.abs(x[0, 0, 0].astype(jnp.float32)) * 16) % 32
    return jnp.stack([first, jnp.int32(0), 40 - first, jnp.int32(20)])


def experts(params, x, **options):
    kernels = [params["gate"], params["up"], params["down"]]
    return squared(jlp.grouped_mlp(x.reshape(-1, K), kernels, sizes_for(x), **options))


def grouped(params, x):
    x, sizes = x.reshape(-1, K), sizes_for(x)
    gate, up = (jlp.grouped_matmul(x, params[name], sizes, name=name) for name in ("gate", "up"))
    return squared(jlp.grouped_matmul(jlp.swiglu(gate, up), params["down"], sizes, name="down"))


class TestExperts:
    @pytest.mark.slow
    @pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
    @pytest.mark.parametrize("loss", [experts, grouped])
    def test_bits_are_those_of_the_mean_of_separate_steps(self, loss, recipe):
        with under(recipe):
            assert_trees(
                jax.jit(jlp.accumulate_gradients(loss, microbatches=PARTS))(OF_EXPERTS, X), by_hand(loss, OF_EXPERTS, X)
            )

    @pytest.mark.slow
    @pytest.mark.parametrize("saved", ["8bit", "recompute"])
    def test_whatever_the_mlp_keeps(self, saved):
        loss = functools.partial(experts, saved=saved)
        functools.update_wrapper(loss, experts)
        with jlp.autocast(NVFP4):
            assert_trees(
                jax.jit(jlp.accumulate_gradients(loss, microbatches=PARTS))(OF_EXPERTS, X), by_hand(loss, OF_EXPERTS, X)
            )

    @pytest.mark.parametrize("loss", [experts, grouped])
    def test_kernels_are_quantised_before_the_loop(self, loss):
        with jlp.autocast(NVFP4):
            assert calls(loss, OF_EXPERTS, X, "jaxlowprec_quantize") == (0, 3)

    def test_sums_are_made_in_the_gemms(self):
        with jlp.autocast(NVFP4):
            jaxpr = jax.make_jaxpr(jlp.accumulate_gradients(experts, microbatches=PARTS))(OF_EXPERTS, X).jaxpr
        (loop,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
        added = [e.outvars[0].aval.shape for e in primitives(loop.params["jaxpr"].jaxpr) if "add" in e.primitive.name]
        assert not {w.shape for w in OF_EXPERTS.values()} & set(added)

    @pytest.mark.slow
    def test_of_a_block_of_nnx(self):
        model = jlp.nnx.MoE(EXPERTS, K, HIDDEN, top_k=2, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        graph, state = nnx.split(model)

        def loss(state, x):
            y, aux = nnx.merge(graph, state)(x)
            return squared(y) + aux.load_balance_loss

        with jlp.autocast(NVFP4):
            assert calls(loss, state, X, "jaxlowprec_quantize") == (0, 3)
            found = jax.jit(jlp.accumulate_gradients(loss, microbatches=PARTS))(state, X)
            wanted = by_hand(loss, state, X)
        assert_trees(found[1]["experts"], wanted[1]["experts"])
        assert_trees(found, wanted, exact=False)


@pytest.mark.slow
def test_delayed_scaling_keeps_the_largest_amax():
    recipe = jlp.DelayedScaling(amax_history_len=4)
    params = {"kernel": PARAMS["up"], delayed_scaling.OVERWRITE_WITH_GRADIENT: delayed_scaling.init_state(recipe)}

    def loss(params, x):
        state = params[delayed_scaling.OVERWRITE_WITH_GRADIENT]
        return squared(jlp.linear(x, params["kernel"], state=state)[0])

    with jlp.autocast(recipe):
        _, found = jax.jit(jlp.accumulate_gradients(loss, microbatches=PARTS))(params, X)
        step = jax.jit(jax.grad(loss))
        parts = [jax.device_get(step(params, np.asarray(X)[i::PARTS])) for i in range(PARTS)]
    assert_same_bytes(found["kernel"], sum(part["kernel"] for part in parts) / np.float32(PARTS))
    name = delayed_scaling.OVERWRITE_WITH_GRADIENT
    for leaf, new in found[name].items():
        assert_same_bytes(new, functools.reduce(np.maximum, [part[name][leaf] for part in parts]))


@pytest.mark.slow
def test_nnx_and_linen_models():
    x = X.reshape(-1, K)
    model = nnx.eval_shape(lambda: jlp.nnx.MLP(K, F, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    state = numbers(state)
    dense = nn.Sequential([jlp.linen.Dense(F, dtype=jnp.bfloat16), jlp.linen.Dense(K, dtype=jnp.bfloat16)])
    variables = numbers(jax.eval_shape(dense.init, jax.random.key(0), x))
    for loss, params in (
        (lambda state, x: squared(nnx.merge(graph, state)(x)), state),
        (lambda variables, x: squared(dense.apply(variables, x)), variables),
    ):
        with jlp.autocast(jlp.MXFP8BlockScaling()):
            kernels = sum(leaf.ndim == 2 for leaf in jax.tree.leaves(params))
            assert calls(loss, params, x, "jaxlowprec_quantize")[1] == kernels
            assert_trees(
                jax.jit(jlp.accumulate_gradients(loss, microbatches=PARTS))(params, x), by_hand(loss, params, x)
            )


@pytest.mark.slow
def test_on_a_mesh_that_splits_the_batch():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))
    params = jax.device_put(PARAMS, jax.NamedSharding(mesh, jax.P()))
    with jlp.autocast(NVFP4):
        program = jax.jit(jlp.accumulate_gradients(loss, microbatches=PARTS)).lower(params, x).compile()
        value, gradients = program(params, x)
        wanted = jax.jit(jlp.accumulate_gradients(loss, microbatches=PARTS))(PARAMS, X)
    assert "all-gather" not in program.as_text()  # each device has a share of every part
    for a, b in zip(jax.tree.leaves((value, gradients)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


def test_aux_is_stacked():
    def with_aux(params, x):
        return loss(params, x), {"first": x[0, 0, 0]}

    (value, aux), gradients = jax.jit(jlp.accumulate_gradients(with_aux, microbatches=PARTS, has_aux=True))(PARAMS, X)
    assert_trees((value, gradients), by_hand(loss, PARAMS, X))
    assert_same_bytes(aux["first"], np.asarray(X)[:PARTS, 0, 0])


@pytest.mark.slow
def test_a_step_holds_one_tree_of_gradients():
    """Of a large kernel and few tokens, against adding up the gradients of separate parts."""
    size = 1024
    params, x = {"kernel": jnp.ones((size, size))}, jnp.ones((PARTS * 16, size), jnp.bfloat16)

    def loss(params, x):
        return squared(jlp.linear(x, params["kernel"]))

    def separate(params, x):
        def part(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, x)), None

        return jax.lax.scan(part, jax.tree.map(jnp.zeros_like, params), x.reshape(PARTS, 16, size))[0]

    with jlp.autocast(NVFP4):
        programs = [
            jax.jit(f).lower(params, x).compile().memory_analysis()
            for f in (jlp.accumulate_gradients(loss, microbatches=PARTS), separate)
        ]
    ours, theirs = (m.temp_size_in_bytes + m.output_size_in_bytes for m in programs)
    assert theirs - ours > 0.5 * params["kernel"].nbytes


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: jlp.accumulate_gradients(3, microbatches=4), TypeError, "loss=3; needs a function"),
        (lambda: jlp.accumulate_gradients(loss, microbatches=0), ValueError, "microbatches"),
        (lambda: jlp.accumulate_gradients(loss, microbatches=4, has_aux=1), TypeError, "has_aux=1"),
        (lambda: jlp.accumulate_gradients(loss, microbatches=3)(PARAMS, X), ValueError, "batch has arrays of 16 rows"),
        (lambda: jlp.accumulate_gradients(loss, microbatches=4)(PARAMS, {}), ValueError, "batch has no array"),
        (lambda: jlp.accumulate_gradients(loss, microbatches=4)(PARAMS, 1.0), ValueError, "batch has a scalar"),
        (
            lambda: jlp.accumulate_gradients(loss, microbatches=4)(PARAMS, (X, X[:8])),
            ValueError,
            "arrays of 8 and 16 rows",
        ),
    ],
    ids=["loss", "count", "flag", "multiple", "empty", "scalar", "lengths"],
)
def test_errors(call, error, says):
    with pytest.raises(error, match=f"accumulate_gradients: .*{says}"):
        call()
