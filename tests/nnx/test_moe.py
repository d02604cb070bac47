"""The block of experts of NNX: its parts, its numbers, its recipes, its places on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes
from tests.moe.stack import RECIPES, each_recipe
from tests.sharding.meshes import collectives, mesh_of, place

EXPERTS, WIDTH, HIDDEN, K = 8, 64, 32, 2
X = jax.random.normal(jax.random.key(0), (8, 16, WIDTH), jnp.bfloat16)


def block(experts=EXPERTS, k=K, seed=0, **options):
    options = {"dtype": jnp.bfloat16} | options
    return jlp.nnx.MoE(experts, WIDTH, HIDDEN, top_k=k, rngs=nnx.Rngs(seed), **options)


def by_hand(moe, x, gated=True, shared=False):
    """The block in float64, token by token."""
    state = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(nnx.state(moe, nnx.Param)))
    x = np.asarray(x.astype(jnp.float32), np.float64).reshape(-1, WIDTH)

    def silu(v):
        return v / (1 + np.exp(-v))

    def expert(parts, rows):
        up = rows @ parts["up_proj"]["kernel"]
        hidden = silu(rows @ parts["gate_proj"]["kernel"]) * up if gated else silu(up)
        return hidden @ parts["down_proj"]["kernel"]

    logits = x @ state["router"]["kernel"]
    y = expert(state["shared_experts"], x) if shared else np.zeros_like(x)
    for token, row in enumerate(logits):
        chosen = np.argsort(-row, kind="stable")[: moe.settings.top_k]
        scores = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        weights = scores[chosen] / scores[chosen].sum() if moe.settings.top_k > 1 else scores[chosen]
        for e, weight in zip(chosen, weights, strict=True):
            own = jax.tree.map(lambda leaf: leaf[e], state["experts"])
            y[token] += weight * expert(own, x[token])
    return y


class TestNumbers:
    @pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
    @pytest.mark.parametrize("shared", [0, 48], ids=["", "shared"])
    @pytest.mark.parametrize(("experts", "k"), [(8, 2), (4, 1), (3, 3)])
    def test_are_those_of_going_token_by_token(self, experts, k, shared, gated):
        x = X.astype(jnp.float32)
        moe = block(experts, k, dtype=jnp.float32, shared_hidden_features=shared, gated=gated)
        y, aux = nnx.jit(lambda m, x: m(x))(moe, x)
        expected = by_hand(moe, x, gated, bool(shared))
        np.testing.assert_allclose(np.asarray(y).reshape(-1, WIDTH), expected, atol=2e-6)
        assert y.shape == X.shape and aux.tape.shape == (8, 16, k)
        np.testing.assert_array_equal(aux.group_sizes, np.bincount(np.ravel(aux.tape), minlength=experts))

    @each_recipe
    def test_under_a_recipe_are_near(self, recipe):
        if recipe is None:
            pytest.skip("without a recipe there is nothing to be near to")
        moe = block(shared_hidden_features=32)
        call = nnx.jit(lambda m, x, tape: m(x, tape)[0])
        _, aux = moe(X)
        expected = call(moe, X, aux.tape).astype(jnp.float32)
        with jlp.autocast(recipe):
            actual = call(moe, X, aux.tape).astype(jnp.float32)
        assert jnp.any(actual != expected)
        assert jnp.linalg.norm(actual - expected) < 0.35 * jnp.linalg.norm(expected)  # NVFP4's in three products

    @pytest.mark.parametrize("shape", [(WIDTH,), (5, WIDTH), (2, 3, 4, WIDTH)], ids=str)
    def test_are_of_any_leading_axes(self, shape):
        y, aux = block()(jnp.ones(shape))
        assert y.shape == shape and aux.tape.shape == (*shape[:-1], K)

    def test_of_a_token_do_not_depend_on_the_others(self):
        for name in ("bf16", "mxfp8", "fp8_block", "int4_qat"):
            call = nnx.jit(lambda m, x: m(x)[0])
            moe = block(recipe=RECIPES[name], shared_hidden_features=32)
            others = 3 * jax.random.normal(jax.random.key(1), X.shape, X.dtype)
            mine, theirs = jnp.asarray([[0, 3], [2, 7], [7, 15]]).T
            y, z = call(moe, X), call(moe, others.at[mine, theirs].set(X[mine, theirs]))
            assert_same_bytes(z[mine, theirs], y[mine, theirs])
            assert jnp.any(y != z)


class TestRouter:
    @each_recipe
    def test_is_float32_whatever_the_recipe(self, recipe):
        moe = block(param_dtype=jnp.bfloat16)
        assert moe.router.kernel[...].dtype == jnp.float32
        call = nnx.jit(lambda m, x: m(x)[1])
        with jlp.autocast(recipe, enabled=recipe is not None):
            assert_same_bytes(call(moe, X), call(block(param_dtype=jnp.bfloat16), X))
            assert call(moe, X).load_balance_loss.dtype == jnp.float32
        assert_same_bytes(call(moe, X), jax.device_get(call(moe, X)))

    def test_learns_from_one_choice_unless_its_weight_is_fixed(self):
        def slope(**options):
            gradient = nnx.grad(lambda m: jnp.sum(m(X)[0].astype(jnp.float32) ** 2))(block(**options))
            return jnp.linalg.norm(gradient["router"]["kernel"][...])

        assert slope(k=1) > 1 and slope(k=2) > 1 and slope(k=1, normalize=True) < 1e-3

    def test_its_loss_is_scaled_by_the_coefficient(self):
        small, large = (block(load_balance_coef=c)(X)[1].load_balance_loss for c in (0.01, 1.0))
        np.testing.assert_allclose(100 * small, large, rtol=1e-6)
        assert 1 < large < EXPERTS


class TestPolicy:
    def test_explain_lists_experts_and_leaves_the_router(self):
        moe = block(shared_hidden_features=32)
        jlp.nnx.name_layers(moe)
        parts = [
            f"{where}/{part}"
            for where in ("experts", "shared_experts")
            for part in ("down_proj", "gate_proj", "up_proj")
        ]
        for recipe, fmt in ((jlp.Int4QAT(group_size=32), jlp.Int4(32)), (jlp.NVFP4BlockScaling(), jlp.NVFP4((16, 16)))):
            assert jlp.explain(moe, recipe).formats == {"router": None} | dict.fromkeys(parts, fmt)

    def test_parts_have_names_of_the_blocks(self):
        moe = block(name="blocks/3/moe", shared_hidden_features=32)
        assert moe.experts.up_proj.name == "blocks/3/moe/experts/up_proj"
        assert moe.shared_experts.gate_proj.name == "blocks/3/moe/shared_experts/gate_proj"
        assert moe.router.name == "blocks/3/moe/router" and block().router.name == ""

    @pytest.mark.parametrize("name", ["int4_qat", "nvfp4_qat"])
    def test_what_was_trained_is_served_with_the_same_bits(self, name):
        moe = block(shared_hidden_features=32)
        jlp.nnx.name_layers(moe)
        call = nnx.jit(lambda m, x: m(x))
        served = jlp.quantize_params(moe, RECIPES[name])
        kernel = served.experts.up_proj.kernel.get_value()
        assert isinstance(kernel, jlp.QuantizedArray) and kernel.shape == (EXPERTS, WIDTH, HIDDEN)
        assert isinstance(served.router.kernel, nnx.Param)
        with jlp.autocast(RECIPES[name]):
            expected = call(moe, X)
        assert_same_bytes(call(served, X), expected)
        assert jlp.explain(served, None).formats["experts/up_proj"] == RECIPES[name].weight_format

    def test_delayed_scaling_is_refused_with_what_to_do(self):
        with jlp.autocast(jlp.DelayedScaling()):
            moe = block(shared_hidden_features=32)
            with pytest.raises(ValueError, match="Float8CurrentScaling"):
                moe(X)
            current = block(recipe=jlp.Float8CurrentScaling())
            assert jnp.all(jnp.isfinite(current(X)[0]))
        owners = {path[:2] for path, _ in nnx.to_flat_state(nnx.state(moe, jlp.nnx.OverwriteWithGradient))}
        assert owners == {("shared_experts", part) for part in ("up_proj", "gate_proj", "down_proj")}

    def test_a_pattern_leaves_experts_out(self):
        moe = block(name="moe")
        recipe = jlp.Int4QAT(group_size=32, exclude=("experts/",))
        call = nnx.jit(lambda m, x: m(x)[0])
        plain = call(moe, X)
        with jlp.autocast(recipe):
            assert_same_bytes(call(moe, X), plain)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"k": 9}, ValueError, "MoE: top_k=9 of num_experts=8"),
        ({"k": 0}, ValueError, "top_k=0"),
        ({"scoring": "max"}, ValueError, "MoE: scoring='max'"),
        ({"gated": "silu"}, TypeError, "gated='silu'"),
        ({"recipe": "nvfp4"}, TypeError, "recipe='nvfp4'"),
    ],
)
def test_a_wrong_argument_is_named(options, error, message):
    with pytest.raises(error, match=message):
        block(**options)


def trained(moe, x, loss, steps=12):
    """The values of a loss of output and aux over steps of Adam."""
    optimizer = nnx.Optimizer(moe, optax.adam(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(moe, optimizer):
        value, gradients = nnx.value_and_grad(lambda m: loss(*m(x)))(moe)
        optimizer.update(moe, gradients)
        return value

    return [float(step(moe, optimizer)) for _ in range(steps)]


@pytest.mark.parametrize("name", ["bf16", "nvfp4"])
def test_training_lowers_the_loss(name):
    def loss(y, aux):
        return jnp.mean((y - jnp.roll(X, 1, axis=-1)).astype(jnp.float32) ** 2) + aux.load_balance_loss

    with jlp.autocast(RECIPES[name], enabled=RECIPES[name] is not None):
        values = trained(block(), X, loss)
    assert values[-1] < 0.9 * values[0]


def test_training_by_the_load_balance_loss_levels_the_load():
    values = trained(block(load_balance_coef=1.0), X + 2, lambda y, aux: aux.load_balance_loss)  # most to the same
    assert values[0] > 1.5 and values[-1] < 1.2


class Model(nnx.Module):
    """Blocks made by nnx.vmap and run by nnx.scan with a tape, recomputed in the backward pass where asked for."""

    def __init__(self, remat, dtype, rngs):
        self.remat = remat

        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return jlp.nnx.MoE(EXPERTS, WIDTH, HIDDEN, top_k=K, dtype=dtype, rngs=rngs)

        self.blocks = make(rngs)

    def __call__(self, x, tape):
        @nnx.scan(in_axes=(0, nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        def forward(block, x, tape):
            y, aux = nnx.remat(jlp.nnx.MoE.__call__)(block, x, tape) if self.remat else block(x, tape)
            return x + y, aux.tape

        y, used = forward(self.blocks, x, tape.experts)
        return y, jlp.moe.RoutingTape(used)


@pytest.mark.parametrize(  # each takes the model with remat and the one without; often the form that has most in it
    "name, remat, dtype",
    [
        pytest.param("bf16", True, jnp.float32, marks=pytest.mark.slow),
        ("nvfp4", True, jnp.bfloat16),
        pytest.param("nvfp4", False, jnp.float32, marks=pytest.mark.slow),
    ],
)
def test_nnx_scan_and_remat_record_and_replay(name, remat, dtype):
    def gradients(model, tape):
        def loss(model):
            y, used = model(X.astype(dtype), tape)
            return jnp.sum(y.astype(jnp.float32) * jnp.cos(jnp.arange(y.size)).reshape(y.shape)), (y, used)

        return nnx.jit(nnx.value_and_grad(loss, has_aux=True))(model)

    afresh = jlp.moe.RoutingTape.afresh(2, X.shape[:-1], K)
    with jlp.autocast(RECIPES[name], enabled=RECIPES[name] is not None):
        model = Model(remat, dtype, nnx.Rngs(0))
        recorded = gradients(model, afresh)
        tape = recorded[0][1][1]
        tape.check(EXPERTS, layers=2, tokens=X.shape[:-1])
        assert_same_bytes(gradients(model, tape), recorded)
        other = gradients(Model(not remat, dtype, nnx.Rngs(0)), tape)
    assert_same_bytes(other[0][1][1], tape)
    if name == "bf16":  # XLA fuses another backward pass; under nvfp4 a code that flips then makes more of it
        for a, e in zip(jax.tree.leaves(other[1]), jax.tree.leaves(recorded[1]), strict=True):
            assert jnp.linalg.norm(a - e) <= 1e-6 * jnp.linalg.norm(e)


class TestMesh:
    def gradients(self, moe, x, **how):
        graph, parameters, rest = nnx.split(moe, nnx.Param, ...)

        def call(parameters, x):
            y, aux = nnx.merge(graph, parameters, rest)(x)
            return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)) + aux.load_balance_loss

        return parameters, jax.value_and_grad(call, argnums=(0, 1))

    def same_to_rounding(self, actual, expected):
        for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, e, rtol=0, atol=3e-6 * max(1, np.abs(e).max()))

    @pytest.mark.parametrize("kernels", [P(), P("a"), P("a", "b", None)], ids=str)
    def test_split_tokens_and_kernels_give_what_one_device_gives(self, kernels):
        x, mesh = X.astype(jnp.float32), mesh_of((2, 4))
        moe = block(dtype=jnp.float32, shared_hidden_features=32)
        parameters, call = self.gradients(moe, x)
        expected = jax.jit(call)(parameters, x)
        with jax.set_mesh(mesh):
            placed = jax.tree.map(lambda leaf: place(leaf, mesh, kernels if leaf.ndim == 3 else P()), parameters)
            actual = jax.jit(call)(placed, place(x, mesh, P(("a", "b"))))
        self.same_to_rounding(actual, expected)

    def test_within_shard_map_one_sum_combines_the_experts(self):
        x, mesh = X.astype(jnp.float32), mesh_of((2, 4))
        moe = block(dtype=jnp.float32, expert_axis="b")
        graph, parameters = nnx.split(moe)
        alone = block(dtype=jnp.float32)
        specs = jax.tree.map(lambda leaf: P("b") if leaf.ndim == 3 else P(), parameters)

        def call(parameters, x):
            y, aux = nnx.merge(graph, parameters)(x)
            return y, aux.tape

        apply = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=(specs, P("a")), out_specs=P("a")))
        compiled = apply.lower(parameters, x).compile()
        y, aux = alone(x)
        actual, tape = compiled(parameters, x)
        assert_same_bytes(jax.device_get(tape), aux.tape)
        self.same_to_rounding(actual, y)
        sums = [(kind, elements) for kind, elements in collectives(compiled)]
        assert sums == [("all-reduce", x.size // 2)]

        weights = jnp.cos(jnp.arange(x.size)).reshape(x.shape)
        of = [
            jax.jit(jax.grad(lambda p, x: jnp.sum(f(p, x) * weights), argnums=(0, 1)))
            for f in (lambda p, x: apply(p, x)[0], lambda p, x: nnx.merge(nnx.graphdef(alone), p)(x)[0])
        ]
        self.same_to_rounding(*(gradient(parameters, x) for gradient in of))

    @pytest.mark.parametrize(
        ("experts", "kernels", "message"),
        [(6, P(), "6 experts over expert_axis='b' of 4 devices"), (8, P(), r"group_sizes \(2,\): needs")],
    )
    def test_within_shard_map_unequal_splits_are_named(self, experts, kernels, message):
        graph, parameters = nnx.split(block(experts, expert_axis="b"))

        def call(parameters, x):
            return nnx.merge(graph, parameters)(x)[0]

        with pytest.raises(ValueError, match=message):
            jax.shard_map(call, mesh=mesh_of((2, 4)), in_specs=(kernels, P("a")), out_specs=P("a"))(parameters, X)
