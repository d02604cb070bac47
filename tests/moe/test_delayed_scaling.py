"""Delayed scaling of the grouped layers and the blocks of Linen and NNX: a state of each expert beside its kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec.delayed_scaling import (
    OVERWRITE_WITH_GRADIENT,
    TENSORS,
    combined_by_max,
    init_state,
    overwrite_with_gradient,
)
from jaxlowprec.recipes import silence
from tests.flax.experts import EXPERTS, WIDTH, K, X, block, compiled, total
from tests.flax.libraries import LIBRARIES, weighted
from tests.helpers import assert_same_bytes, often

RECIPE = jlp.DelayedScaling(amax_history_len=3)
ROWS, SIZES = X[:3].reshape(48, WIDTH), jnp.asarray([10, 0, 1, 8, 4, 5, 9, 6], jnp.int32)  # 5 rows belong to no expert
TOKENS = np.asarray(X, np.float32).reshape(-1, WIDTH)
PARTS = ("gate_proj", "up_proj", "down_proj")
each_library = pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)


def seen(tree):
    """The tree with states as if the layers had seen steps: other scales for each expert."""

    def fill(path, leaf):
        if OVERWRITE_WITH_GRADIENT not in jax.tree_util.keystr(path):
            return leaf
        return jnp.asarray(np.random.default_rng(leaf.size).uniform(0.5, 4, leaf.shape).astype(np.float32))

    return jax.tree_util.tree_map_with_path(fill, tree)


def grouped(library, within=True, **options):
    with jlp.autocast(RECIPE, enabled=within):
        return library.model(library.maker("GroupedLinear", EXPERTS, WIDTH, 32, **options), ROWS, SIZES)


def made(library, within=True, **options):
    with jlp.autocast(RECIPE, enabled=within):
        model = library.model(block(library, **options), X)
    model.tree = seen(model.tree)
    return model


def gradients_of(model, *inputs, loss=lambda out: weighted(out[0]), **options):
    with jlp.autocast(RECIPE):
        return model.gradients(loss, *inputs, **options)


def amaxes_by_expert(tape):
    """The largest magnitude among the tokens of each expert; 0 where there are none."""
    tape = np.asarray(tape).reshape(-1, K)
    return [float(np.abs(TOKENS[np.any(tape == e, axis=1)]).max(initial=0)) for e in range(EXPERTS)]


class TestStates:
    @pytest.mark.slow
    @each_library
    def test_are_made_for_each_expert_beside_the_parameters(self, library):
        make = block(library, shared_hidden_features=32)
        plain = library.initial(make, X).compile()(jax.random.key(0))
        with jlp.autocast(RECIPE):
            tree = library.initial(make, X).compile()(jax.random.key(0))
        for part in PARTS:
            assert_same_bytes(
                tree["experts"][part].pop(OVERWRITE_WITH_GRADIENT), init_state(RECIPE, num_experts=EXPERTS)
            )
            assert_same_bytes(tree["shared_experts"][part].pop(OVERWRITE_WITH_GRADIENT), init_state(RECIPE))
        assert_same_bytes(tree, plain)

    @pytest.mark.slow
    @each_library
    def test_do_not_matter_without_the_recipe(self, library):
        having, plain = made(library), library.model(block(library), X)
        assert_same_bytes(compiled(having)(having.tree, X), compiled(plain)(plain.tree, X))

    @pytest.mark.slow
    @each_library
    def test_of_a_stack_are_each_layers(self, library):
        def call(block, x):
            return x + 0.5 * block.moe(x)[0]

        with jlp.autocast(RECIPE):
            model = library.model(library.stack(library.composed(call, moe=block(library)), 2, remat=True), X)
        new = gradients_of(model, X, loss=weighted)["blocks"]["moe"]["experts"]["up_proj"]
        histories = new[OVERWRITE_WITH_GRADIENT]["kernel_amax_history"]
        assert histories.shape == (2, EXPERTS, 3)
        kernels = model.tree["blocks"]["moe"]["experts"]["up_proj"]["kernel"]
        np.testing.assert_array_equal(histories[..., 0], jnp.abs(kernels).max(axis=(2, 3)))

    @each_library
    def test_that_are_missing_are_named_with_the_remedies(self, library):
        model = library.model(block(library), X)
        remedies = (
            r"^(MoE|grouped_matmul): DelayedScaling needs .*within autocast\(recipe\), call .*add_delayed_scaling"
        )
        with jlp.autocast(RECIPE), pytest.raises(ValueError, match=remedies):
            jax.eval_shape(model, X)
        with jlp.autocast(RECIPE), pytest.raises(ValueError, match=remedies):
            jax.eval_shape(grouped(library, within=False), ROWS, SIZES)

    @each_library
    def test_of_another_history_length(self, library):
        with jlp.autocast(jlp.DelayedScaling(amax_history_len=8)), pytest.raises(ValueError, match="make it anew"):
            jax.eval_shape(made(library), X)


class TestGroupedLayers:
    @each_library
    def test_a_step_is_grouped_matmuls(self, library):
        model = grouped(library)
        model.tree = seen(model.tree)

        @functools.partial(jax.jit, static_argnums=0)
        def step(loss, tree):
            return jax.grad(loss)(tree)

        def by_hand(tree):
            state = tree[OVERWRITE_WITH_GRADIENT]
            rows, kernel, bias = (a.astype(jnp.float32) for a in (ROWS, tree["kernel"], tree["bias"]))
            return weighted(jlp.grouped_matmul(rows, kernel, SIZES, bias, recipe=RECIPE, state=state)[0])

        assert_same_bytes(gradients_of(model, ROWS, SIZES, loss=weighted), step(by_hand, model.tree))

    @pytest.mark.slow
    @each_library
    def test_calls_are_combined_by_max(self, library):
        def twice(m, x, sizes):
            return m.layer(4 * x, sizes) + m.layer(x, sizes[::-1])

        with jlp.autocast(RECIPE):
            make = library.maker("GroupedLinear", EXPERTS, WIDTH, 32)
            model = library.model(library.composed(twice, layer=make), ROWS, SIZES)
        alone = grouped(library)
        alone.tree = model.tree["layer"]
        new = gradients_of(model, ROWS, SIZES, loss=weighted)["layer"][OVERWRITE_WITH_GRADIENT]
        first, second = (
            gradients_of(alone, k * ROWS, sizes, loss=weighted)[OVERWRITE_WITH_GRADIENT]
            for k, sizes in ((4, SIZES), (1, SIZES[::-1]))
        )
        for tensor in ("input", "kernel"):
            name = f"{tensor}_amax_history"
            assert_same_bytes(new[name], jnp.maximum(first[name], second[name]))

    @pytest.mark.slow
    @each_library
    def test_a_use_that_autodiff_would_add_up_is_refused(self, library):
        def in_scan(m, x, sizes):
            return jax.lax.scan(lambda y, k: (y + m.layer(k * x, sizes), None), jnp.zeros((48, 32)), jnp.ones(2))[0]

        with jlp.autocast(RECIPE):
            make = library.maker("GroupedLinear", EXPERTS, WIDTH, 32)
            model = library.model(library.composed(in_scan, layer=make), ROWS, SIZES)
        with pytest.raises(ValueError, match=r"Grouped(Dense|Linear): .*combined_by_max"):
            gradients_of(model, ROWS, SIZES, loss=weighted)
        new = gradients_of(model, ROWS, SIZES, loss=weighted, wrap=combined_by_max)["layer"][OVERWRITE_WITH_GRADIENT]
        np.testing.assert_array_equal(new["input_amax_history"][0, 0], jnp.abs(ROWS[:10]).max())

    @each_library
    def test_kernels_quantised_once_have_the_scales_of_the_state(self, library):
        model = grouped(library)
        model.tree = seen(model.tree)
        with jlp.autocast(RECIPE):
            once = model.quantized_once(ROWS, SIZES)
            assert_same_bytes(once.run(ROWS, SIZES), model.run(ROWS, SIZES))

    @each_library
    def test_calibrating_records_what_a_step_would(self, library):
        model = grouped(library)
        with jlp.autocast(RECIPE, calibrating=True):
            found = model.gradients(weighted, ROWS, SIZES)[OVERWRITE_WITH_GRADIENT]
        assert_same_bytes(found, gradients_of(model, ROWS, SIZES, loss=weighted)[OVERWRITE_WITH_GRADIENT])

    def test_of_nnx_get_a_state_later(self):
        layer = grouped(LIBRARIES["nnx"], within=False).module
        assert getattr(layer, OVERWRITE_WITH_GRADIENT) is None
        jlp.nnx.add_delayed_scaling(layer, RECIPE)
        with jlp.autocast(RECIPE):
            assert_same_bytes(layer(ROWS, SIZES), grouped(LIBRARIES["nnx"])(ROWS, SIZES))

    def test_of_nnx_get_a_state_by_conversion(self):
        layer = grouped(LIBRARIES["nnx"], within=False).module
        model = jlp.nnx.convert(nnx.Dict(experts=layer), RECIPE)
        assert_same_bytes(model.experts(ROWS, SIZES), made_by_hand(layer))

    def test_an_abstract_state_of_nnx_counts_as_new(self, monkeypatch):
        monkeypatch.setattr(silence, "_said", set())
        layer = grouped(LIBRARIES["nnx"]).module
        with jlp.autocast(RECIPE):
            abstract = nnx.eval_shape(lambda: jlp.nnx.GroupedLinear(EXPERTS, WIDTH, 32, rngs=nnx.Rngs(0)))
            abstract.kernel, abstract.bias = layer.kernel, layer.bias
            with pytest.warns(UserWarning, match="state is abstract.* counts as new"):
                assert_same_bytes(abstract(ROWS, SIZES), layer(ROWS, SIZES))


def made_by_hand(layer):
    state, dtype = init_state(RECIPE, num_experts=EXPERTS), layer.kernel[...].dtype
    kernel, bias = layer.kernel[...], layer.bias[...]
    return jlp.grouped_matmul(ROWS.astype(dtype), kernel, SIZES, bias, recipe=RECIPE, state=state)[0]


class TestBlocks:
    @pytest.mark.slow
    @each_library
    def test_each_expert_sees_its_tokens(self, library):
        model = made(library)
        others = np.asarray([0, 1, 2, 4, 5, 6, 7])  # nobody goes to expert 3
        first = np.arange(X.shape[0] * X.shape[1]).reshape(X.shape[:2]) % 7
        tape = jnp.asarray(np.stack([others[first], others[first - 3]], axis=-1), jnp.int32)
        with jlp.autocast(RECIPE):
            gradient = jax.jit(jax.grad(lambda tree: weighted(model.apply(tree, X, tape)[0])))
            new, old = gradient(model.tree)["experts"], model.tree["experts"]
        wanted = amaxes_by_expert(tape)
        assert wanted[3] == 0 and sorted(wanted)[1] > 0
        for part in PARTS:
            state, before = (layers[part][OVERWRITE_WITH_GRADIENT] for layers in (new, old))
            for tensor in TENSORS:
                history = state[f"{tensor}_amax_history"]
                assert_same_bytes(history[:, 1:], jnp.roll(before[f"{tensor}_amax_history"], -1, axis=1)[:, 1:])
                assert (history[3, 0] == 0) == (tensor != "kernel")
            amaxes = jnp.abs(old[part]["kernel"]).max(axis=(1, 2))
            np.testing.assert_array_equal(state["kernel_amax_history"][:, 0], amaxes)
            if part != "down_proj":
                np.testing.assert_array_equal(state["input_amax_history"][:, 0], np.float32(wanted))

    @pytest.mark.slow
    def test_both_libraries_have_the_same_bits(self):
        models = [made(library, shared_hidden_features=32) for library in LIBRARIES.values()]
        assert_same_bytes(*(model.tree for model in models))
        with jlp.autocast(RECIPE):
            assert_same_bytes(*(model.run(X, loss=total) for model in models))

    @pytest.mark.slow
    @pytest.mark.parametrize("library", often(["nnx"], list(LIBRARIES)))
    def test_what_is_computed_again_is_recorded_once(self, library):
        expected = gradients_of(made(LIBRARIES[library]), X)
        assert_same_bytes(gradients_of(made(LIBRARIES[library], saved="recompute"), X), expected)

    @pytest.mark.slow
    @pytest.mark.parametrize("library", often(["linen"], list(LIBRARIES)))
    def test_layers_that_are_not_one_function_have_the_same_states(self, library):
        """As with an activation that has an array of its own."""
        scale = jnp.ones(())
        found = gradients_of(made(LIBRARIES[library], activation=lambda h: jax.nn.silu(h) * scale), X)
        expected = gradients_of(made(LIBRARIES[library]), X)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for part in PARTS:
            ours, theirs = (g["experts"][part][OVERWRITE_WITH_GRADIENT] for g in (found, expected))
            for name in ours:
                np.testing.assert_allclose(ours[name], theirs[name], rtol=2**-7)

    @pytest.mark.slow
    @each_library
    def test_an_evaluation_leaves_the_state(self, library):
        model = made(library)
        with jlp.autocast(RECIPE):
            y, _ = jax.jit(model.apply)(model.tree, X)
            if library.name == "nnx":
                module = model.module
                nnx.jit(lambda module, x: module(x)[0])(module, X)
                assert_same_bytes(nnx.to_pure_dict(nnx.state(module, nnx.Param)), model.tree)
        assert jnp.all(jnp.isfinite(y))


@pytest.mark.slow
@each_library
def test_training_lowers_the_loss_and_scales_follow(library):
    model = made(library, dtype=jnp.float32)
    x, target = X.astype(jnp.float32), jnp.roll(X, 1, axis=-1).astype(jnp.float32)
    apply = model.apply
    model.apply = lambda tree, x: apply(tree, x)[0]
    with jlp.autocast(RECIPE):
        tree, losses = model.trained(overwrite_with_gradient(optax.adam(3e-3)), x, target, 12)
    assert losses[-1] < 0.9 * losses[0]
    for part in PARTS:
        state = tree["experts"][part][OVERWRITE_WITH_GRADIENT]
        assert jnp.all(state["kernel_amax_history"] > 0) and state["input_scale"].shape == (EXPERTS, 1)
        latest = state["kernel_amax_history"].max(axis=1) / 448
        np.testing.assert_allclose(state["kernel_scale"][:, 0], latest, rtol=0.1)
