"""Delayed scaling of experts on a mesh: an expert's state is where its kernels are, and sees all devices' tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from jaxlowprec.layers.delayed_scaling import OVERWRITE_WITH_GRADIENT, TENSORS
from tests.flax.libraries import LIBRARIES
from tests.helpers import assert_same_bytes, often, random_array
from tests.layers.fused.layers import EXACT
from tests.sharding.meshes import mesh_of

EXPERTS, K, WIDTH, HIDDEN, TOKENS = 16, 3, 64, 64, 24
RECIPE = jlp.DelayedScaling(amax_history_len=3)
PARTS = ("gate_proj", "up_proj", "down_proj")
X = random_array((4, TOKENS, WIDTH), seed=5)
each_library = pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)


def block(library, **options):
    return library.maker("MoE", EXPERTS, WIDTH, HIDDEN, K, dtype=jnp.bfloat16, **options)


def whole(library):
    with jlp.autocast(RECIPE):
        return library.model(block(library), X)


def split(library, alone, **options):
    with jlp.autocast(RECIPE):
        return library.like(alone, block(library, **options))


def tapes(case):
    """The experts of all tokens: evenly, or those of the first sequences all in one place."""
    rng = np.random.default_rng(3)
    found = np.stack([rng.permutation(EXPERTS - 1)[:K] for _ in range(4 * TOKENS)]).reshape(4, TOKENS, K)
    if case == "some in one place":
        found[:2] = np.arange(K)
    return jnp.asarray(found, jnp.int32)  # nobody goes to the last expert


def step(model):
    """Of a loss that is a sum over sequences, whatever device has them."""

    def run(tree, x, tape):
        def loss(tree):
            y, _ = model.apply(tree, x, tape)
            weights = jnp.cos(jnp.arange(y[0].size)).reshape(y[0].shape)
            return jnp.sum(y.astype(jnp.float32) * weights)

        return jax.grad(loss)(tree)["experts"]

    return run


def specs_of(tree, axis):
    return jax.tree_util.tree_map_with_path(lambda path, _: P(axis) if "experts" in str(path[0]) else P(), tree)


def states(library, mesh, tokens, tape, steps=2, **options):
    """The states of the experts' layers after steps in which nothing else changes; on one device without a mesh."""
    alone = whole(library)
    model = split(library, alone, **options) if mesh is not None else alone
    run = step(model)
    if mesh is not None:
        specs = specs_of(alone.tree, "a")
        places = {"mesh": mesh, "in_specs": (specs, tokens, tokens), "out_specs": specs["experts"]}
        run = jax.shard_map(run, **places)
    tree, run = alone.tree, jax.jit(run, compiler_options=EXACT)
    with jlp.autocast(RECIPE):
        for _ in range(steps):
            new = run(tree, X, tape)
            of_layers = {
                part: tree["experts"][part] | {OVERWRITE_WITH_GRADIENT: new[part][OVERWRITE_WITH_GRADIENT]}
                for part in PARTS
            }
            tree = tree | {"experts": of_layers}
    return {part: jax.device_get(of_layers[part][OVERWRITE_WITH_GRADIENT]) for part in PARTS}


def assert_agree(found, expected, rtol=2**-6):
    """What experts read has the same bits; the router's weights may have another last bit, and so what follows."""
    for part in PARTS:
        for tensor in TENSORS:
            for name in (f"{tensor}_amax_history", f"{tensor}_scale"):
                ours, theirs = found[part][name], expected[part][name]
                if tensor == "kernel" or (tensor == "input" and part != "down_proj"):
                    assert_same_bytes(ours, theirs)
                np.testing.assert_allclose(ours, theirs, rtol=rtol)
        assert not np.any(found[part]["input_amax_history"][-1]) and np.all(
            found[part]["kernel_amax_history"][:, 0] > 0
        )


FORMS = {
    "sum": (P(), {}),
    "all_to_all": (P("a"), {"kind": "all_to_all"}),
    "deduplicated": (P("a"), {"kind": "deduplicated"}),
    "small buffers": (P("a"), {"kind": "all_to_all", "buffer_factor": 0.2}),
}


CASES = [(library, form) for library in LIBRARIES for form in FORMS]
OFTEN = [("nnx", "sum"), ("linen", "all_to_all"), ("nnx", "deduplicated")]


@pytest.mark.slow
@pytest.mark.parametrize(("library", "form"), often(OFTEN, CASES, 2))
def test_states_are_those_of_one_device(library, form):
    library, (tokens, options), tape = LIBRARIES[library], FORMS[form], tapes("evenly")
    found = states(library, mesh_of((4,)), tokens, tape, exchange=jlp.moe.Exchange("a", **options))
    assert_agree(found, states(library, None, None, tape), 2**-4 if form == "deduplicated" else 2**-6)


@pytest.mark.slow
@each_library
def test_rows_that_travel_as_codes_are_seen_as_they_arrive(library):
    tape, options = tapes("evenly"), {"kind": "all_to_all", "wire": "codes"}
    found = states(library, mesh_of((4,)), P("a"), tape, exchange=jlp.moe.Exchange("a", **options))
    expected = states(library, None, None, tape)
    for part in ("gate_proj", "up_proj"):
        ours, theirs = (s[part]["input_amax_history"] for s in (found, expected))
        np.testing.assert_allclose(ours, theirs, rtol=2**-4)
        assert np.any(ours != theirs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sum", "all_to_all", "deduplicated"])
@pytest.mark.parametrize("case", ["evenly", "some in one place"])
def test_tokens_that_are_split_along_another_axis_are_seen_too(kind, case):
    """Whether or not the usual buffers are large enough for the tokens of each part of the mesh."""
    library, tape = LIBRARIES["nnx"], tapes(case)
    tokens = P("b") if kind == "sum" else P(("b", "a"))
    exchange = jlp.moe.Exchange("a", kind=kind, buffer_factor=1.3)
    found = states(library, mesh_of((2, 2), names="ba"), tokens, tape, exchange=exchange)
    assert_agree(found, states(library, None, None, tape), 2**-4 if kind == "deduplicated" else 2**-6)


@each_library
def test_a_state_that_is_not_split_as_the_kernels_are_is_named(library):
    alone = whole(library)
    specs = jax.tree.map(lambda leaf: P("a") if leaf.ndim == 3 else P(), alone.tree)
    mapped = jax.shard_map(
        split(library, alone, exchange=jlp.moe.Exchange("a")).apply,
        mesh=mesh_of((4,)),
        in_specs=(specs, P()),
        out_specs=P(),
    )
    with jlp.autocast(RECIPE), pytest.raises(ValueError, match=r"has shape \(16, 3\).* needs \(4, 3\).* and 4 experts"):
        jax.eval_shape(mapped, alone.tree, X)


@each_library
def test_kernels_gathered_as_codes_are_refused_with_what_to_do(library):
    alone = whole(library)
    specs = jax.tree.map(lambda leaf: P(None, "a") if leaf.ndim == 3 else P(), alone.tree)
    mapped = jax.shard_map(
        split(library, alone, fsdp_axis="a").apply, mesh=mesh_of((4,)), in_specs=(specs, P("a")), out_specs=P("a")
    )
    with jlp.autocast(RECIPE), pytest.raises(ValueError, match=r"use current scaling \(Float8CurrentScaling\)"):
        jax.eval_shape(mapped, alone.tree, X)
