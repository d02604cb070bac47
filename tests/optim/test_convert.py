"""`convert_state`: a run goes on with other states, and no bit changes that the target can keep."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from jaxlowprec.ops.optimizer_states import join_weight as join
from tests.helpers import assert_same_bytes
from tests.optim.test_compositions import ADAMW, LABELS, MASK, both, gradients, params, quantized, run, stepper
from tests.sharding.meshes import mesh_of

MUON = optax.contrib.muon(1e-3)
HALF = jax.eval_shape(lambda: params(jnp.bfloat16))
PLACED = {  # the same transformations with and without wrappers, wherever these stand
    "alone": (ADAMW, both(ADAMW)),
    "clipped": (
        optax.chain(optax.clip_by_global_norm(1.0), ADAMW),
        optax.chain(optax.clip_by_global_norm(1.0), both(ADAMW)),
    ),
    "masked": (optax.masked(ADAMW, MASK), optax.masked(both(ADAMW), MASK)),
    "multi_transform": (
        optax.multi_transform({"adam": ADAMW, "muon": MUON}, LABELS),
        optax.multi_transform({"adam": both(ADAMW), "muon": both(MUON)}, LABELS),
    ),
    "MultiSteps": (optax.MultiSteps(ADAMW, 2).gradient_transformation(),)
    + (jlp.optim.master_weights(quantized(optax.MultiSteps(ADAMW, 2).gradient_transformation())),),
    "delayed scaling": tuple(
        jlp.delayed_scaling.overwrite_with_gradient(tx) for tx in (ADAMW, jlp.optim.master_weights(ADAMW))
    ),
}


def like_of(name):
    """Parameters that master weights keep the further bits of, in bfloat16."""
    return {**HALF, "emb": params()["emb"]} if name == "masked" else HALF


@pytest.mark.parametrize("name", PLACED)
def test_weights_there_and_back_are_the_same_bits(name):
    source, target = PLACED[name]
    p, state = run(source, params())
    there = jlp.optim.convert_state(state, p, source=source, target=target, like=like_of(name))
    expected = jax.eval_shape(target.init, like_of(name))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), there[1]) == jax.tree.map(lambda x: (x.shape, x.dtype), expected)
    back, state_back = jlp.optim.convert_state(there[1], there[0], source=target, target=source, like=p)
    assert_same_bytes(back, p)
    assert jax.tree.structure(state_back) == jax.tree.structure(state)
    after, expected = stepper(target)(gradients(9, p), *there[::-1])[0], stepper(source)(gradients(9, p), state, p)[0]
    np.testing.assert_allclose(after["b"], expected["b"], rtol=1e-5)  # the decay and the counts went along


def test_codes_are_those_to_nearest_and_stay_so():
    """Of AdamW in float32 to 8 bits, back, and to 8 bits again."""
    tx = quantized(ADAMW)
    p, state = run(ADAMW, params())
    _, there = jlp.optim.convert_state(state, p, source=ADAMW, target=tx)
    for field, code in (("mu", jlp.optim.SIGNED), ("nu", jlp.optim.UNSIGNED)):
        expected = code.encode(getattr(state[0], field)["w"])
        found = [getattr(tree[0], field)["w"] for tree in (there.codes, there.exponents)]
        assert_same_bytes(found, list(expected))
        assert_same_bytes(getattr(there.codes[0], field)["b"], getattr(state[0], field)["b"])
    assert there.codes[0].count == 3 and there.step == 0
    _, back = jlp.optim.convert_state(there, p, source=tx, target=ADAMW)
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(back), strict=True):
        np.testing.assert_allclose(after, before, rtol=1 / 16, atol=1e-4)  # below the range: 0
    assert_same_bytes(jlp.optim.convert_state(back, p, source=ADAMW, target=tx)[1], there)


def test_a_run_goes_on_with_8_bits_as_without():
    """Within a twentieth of what the steps move."""
    tx = quantized(ADAMW)
    p, state = run(ADAMW, params())
    ours = (p, jlp.optim.convert_state(state, p, source=ADAMW, target=tx)[1])
    theirs = (p, state)
    for i in range(3, 8):
        ours, theirs = (
            stepper(tx)(gradients(i, p), ours[1], ours[0]),
            stepper(ADAMW)(gradients(i, p), theirs[1], theirs[0]),
        )
    for a, e, before in zip(*(jax.tree.leaves(tree) for tree in (ours[0], theirs[0], p)), strict=True):
        moved = np.sqrt(np.mean(np.square(np.asarray(e - before, np.float64))))
        assert np.sqrt(np.mean(np.square(np.asarray(a - e, np.float64)))) <= 0.05 * moved


@pytest.mark.parametrize(("bits", "error"), [(32, 0), (24, 2**-16), (16, 2**-8)])
def test_weights_of_fewer_bits(bits, error):
    p, tx = params(), jlp.optim.master_weights(ADAMW, bits=bits)
    half, state = jlp.optim.convert_state(ADAMW.init(p), p, source=ADAMW, target=tx, like=HALF)
    assert half["w"].dtype == jnp.bfloat16 and half["b"].dtype == jnp.float32
    full = np.asarray(join(half["w"], state.remainders["w"]))
    assert np.all(np.abs(full - p["w"]) <= error * np.abs(p["w"]))
    if bits == 16:
        assert state.remainders["w"] is None
        assert_same_bytes(half, jax.tree.map(lambda x, s: x.astype(s.dtype), p, HALF))  # no ties here


def test_more_bits_lose_none():
    """From 24 to 32 bits, and from bfloat16 parameters alone to 32."""
    p, state = run(jlp.optim.master_weights(ADAMW, bits=24), params(jnp.bfloat16))
    target = jlp.optim.master_weights(ADAMW, bits=32)
    new, after = jlp.optim.convert_state(state, p, source=jlp.optim.master_weights(ADAMW, bits=24), target=target)
    assert_same_bytes(join(new["w"], after.remainders["w"]), join(p["w"], state.remainders["w"]))
    p, state = run(ADAMW, params(jnp.bfloat16))
    new, after = jlp.optim.convert_state(state, p, source=ADAMW, target=target)
    assert_same_bytes(new, p)
    assert not np.any(after.remainders["w"]) and after.inner[0].mu["w"].dtype == jnp.float32


def test_a_state_of_other_arguments():
    """Also in jit, and of arrays of NumPy."""
    source, target = quantized(ADAMW), quantized(ADAMW, {"mu": None}, smallest=0, key=7)
    p, state = run(source, params())
    convert = lambda state, p: jlp.optim.convert_state(state, p, source=source, target=target)[1]  # noqa: E731
    found = convert(state, p)
    assert_same_bytes(found.codes[0].nu["w"], state.codes[0].nu["w"])
    assert found.codes[0].mu["w"].dtype == jnp.float32 and np.array_equal(found.words, [0, 7])
    assert_same_bytes(jax.jit(convert)(state, p), found)
    assert_same_bytes(convert(*jax.device_get((state, p))), found)


def test_sharded_arrays_stay_where_they_are():
    mesh, tx = mesh_of((2, 4)), both(ADAMW)
    p, state = run(ADAMW, params())
    whole = jlp.optim.convert_state(state, p, source=ADAMW, target=tx, like=HALF)
    spread = NamedSharding(mesh, P("a", "b"))
    place = lambda x: jax.device_put(x, spread if x.ndim == 2 and x.shape[-1] >= 64 else NamedSharding(mesh, P()))  # noqa: E731
    found = jlp.optim.convert_state(
        *(jax.tree.map(place, tree) for tree in (state, p)), source=ADAMW, target=tx, like=HALF
    )
    assert_same_bytes(jax.device_get(found), jax.device_get(whole))
    for x in (found[0]["w"], found[1].remainders["w"], found[1].inner.codes[0].mu["w"]):
        assert x.sharding.is_equivalent_to(spread, 2)


def test_a_traced_init_knows_nothing_of_conversions():
    """What `jax.eval_shape` has cached of an `init` is no description, and no description is cached."""
    tx = quantized(ADAMW)
    p = params()
    for _ in range(2):
        assert type(jax.eval_shape(tx.init, p)) is jlp.optim.QuantizedState
        assert any(leaf.code for leaf in jlp.optim.explain_state(tx, p).leaves)
        assert type(jlp.optim.convert_state(tx.init(p), p, source=tx, target=ADAMW)[1]) is tuple


class TestErrors:
    def refused(self, error, words, state, p, **options):
        with pytest.raises(error, match=re.escape(words)):
            jlp.optim.convert_state(state, p, **options)

    def test_no_transformation(self):
        p = params()
        needs = "; needs an optax.GradientTransformation such as optax.adamw(1e-3)"
        self.refused(TypeError, f"convert_state: source=3{needs}", ADAMW.init(p), p, source=3, target=ADAMW)
        self.refused(TypeError, f"convert_state: target=None{needs}", ADAMW.init(p), p, source=ADAMW, target=None)

    def test_bits_that_nothing_keeps(self):
        p, tx = params(), both(ADAMW)
        words = "the parameter 'emb' is float32 in source and bfloat16 in target, where nothing keeps the rest: needs"
        self.refused(ValueError, words, ADAMW.init(p), p, source=ADAMW, target=quantized(ADAMW), like=HALF)
        half = params(jnp.bfloat16)
        self.refused(ValueError, words, tx.init(half), half, source=tx, target=ADAMW)
        adam, moments = optax.adam(1e-3), optax.adam(1e-3, mu_dtype=jnp.bfloat16)
        words = "the state '0/mu/b' is float32 in source and bfloat16 in target"
        self.refused(ValueError, words, adam.init(p), p, source=adam, target=moments)

    def test_other_transformations_and_parameters(self):
        p = params()
        state = ADAMW.init(p)
        words = "the state of target has no leaf at"
        self.refused(ValueError, words, state, p, source=ADAMW, target=quantized(optax.lion(1e-3)))
        words = "convert_state: like has [3] at 'b', and params [64]; without wrappers both need the same leaves"
        self.refused(ValueError, words, state, p, source=ADAMW, target=ADAMW, like={**p, "b": jnp.ones(3)})
        words = "convert_state: like has no leaf at 'b', and params [64]"
        like = {name: p[name] for name in ("emb", "w")}
        self.refused(ValueError, words, state, p, source=ADAMW, target=ADAMW, like=like)

    def test_a_state_that_is_not_of_source(self):
        p, tx = params(), quantized(ADAMW)
        words = "quantized_state: the state is a tuple; needs the QuantizedState"
        self.refused(TypeError, words, ADAMW.init(p), p, source=tx, target=ADAMW)
        with pytest.raises(ValueError, match="state is no state of source .*needs one that has the structure") as found:
            jlp.optim.convert_state(tx.init(p), p, source=ADAMW, target=tx)
        assert len(str(found.value)) < 600 and "\n" not in str(found.value)  # arrays are not shown whole
        old = tx.init(p)._replace(version=jnp.int32(2))
        self.refused(ValueError, "the state has version 2", old, p, source=tx, target=ADAMW)

    def test_masters_within_another_tree(self):
        p = params(jnp.bfloat16)
        tx = optax.flatten(jlp.optim.master_weights(ADAMW))
        words = "master_weights: its parameter '' is none of those given, b, emb, w: a transformation around it changes"
        like = jax.eval_shape(lambda: params())
        self.refused(ValueError, words, tx.init(p), p, source=tx, target=optax.flatten(ADAMW), like=like)
