"""`quantized_state`: which leaves have codes, what they take, and what is an error; `explain_state` shows it."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxlowprec as jlp
from jaxlowprec.optim import FIXED, SIGNED, UNSIGNED
from tests.helpers import assert_same_bytes
from tests.numpy_oracle import optimizer_states as oracle

SHAPES = {"w": (64, 96), "stack": (3, 32, 64), "small": (32, 32), "b": (8192,)}


def params(dtype=jnp.float32):
    return {name: jnp.full(shape, 0.5, dtype) for name, shape in SHAPES.items()}


def gradients(i, like=SHAPES):
    return {name: jax.random.normal(jax.random.key(i), shape) for name, shape in like.items()}


def coded(tx, given=None):
    """The code of each leaf that has one, by its path in the inner state."""
    leaves = jlp.optim.explain_state(tx, params() if given is None else given).leaves
    return {leaf.path.removeprefix("codes/"): leaf.code for leaf in leaves if leaf.code and leaf.code != "exponents"}


class TestChoices:
    @pytest.mark.parametrize(
        ("inner", "expected"),
        [
            (optax.adamw(1e-3), {"0/mu": SIGNED, "0/nu": UNSIGNED}),
            (optax.lion(1e-3), {"0/mu": SIGNED}),
            (optax.sgd(1e-3, 0.9), {"0/trace": FIXED}),
            (optax.rmsprop(1e-3), {"0/nu": UNSIGNED}),
            (optax.rmsprop(1e-3, centered=True), {}),  # their difference is a variance
            (optax.amsgrad(1e-3), {"0/mu": SIGNED, "0/nu": UNSIGNED}),  # its maximum would only grow by rounding
            (optax.sm3(1e-3), {}),  # `nu` is momentum there
            (optax.adafactor(1e-3), {}),
            (optax.contrib.ademamix(1e-3), {}),
        ],
        ids=["adamw", "lion", "sgd", "rmsprop", "centred", "amsgrad", "sm3", "adafactor", "ademamix"],
    )
    def test_by_default_are_those_of_known_states(self, inner, expected):
        expected = {f"{field}/{name}": str(code) for field, code in expected.items() for name in ("stack", "w")}
        assert coded(jlp.optim.quantized_state(inner)) == expected

    def test_muons_momentum_is_fixed_point_and_its_adam_is_not(self):
        tx = jlp.optim.quantized_state(optax.contrib.muon(1e-3))
        found = coded(tx, {name: jnp.ones(SHAPES[name]) for name in ("w", "stack")})
        assert found == {
            "inner_states/adam/inner_state/0/mu/stack": str(SIGNED),
            "inner_states/adam/inner_state/0/nu/stack": str(UNSIGNED),
            "inner_states/muon/inner_state/0/mu/w": str(jlp.optim.FixedCode("nearest")),
        }

    def test_rules_add_and_keep_by_name(self):
        rules = {"nu_max": UNSIGNED, "mu": None, "ScaleByAmsgradState.nu": jlp.optim.RelativeCode(False, "nearest")}
        found = coded(jlp.optim.quantized_state(optax.amsgrad(1e-3), rules))
        assert {path.split("/")[1]: code for path, code in found.items()} == {
            "nu": "unsigned float8 1x32, nearest",
            "nu_max": str(UNSIGNED),
        }

    def test_a_layers_name_is_no_field(self):
        given = {"nu": {"kernel": jnp.ones((64, 64))}}
        with pytest.raises(ValueError, match=r"rules\['nu'\] names no field"):
            jlp.optim.quantized_state(optax.adagrad(1e-3), {"nu": UNSIGNED}).init(given)

    def test_a_function_decides_by_path_and_leaf(self):
        def rules(path, leaf):
            return UNSIGNED if "nu/b" in path and leaf.shape == (8192,) else None

        assert coded(jlp.optim.quantized_state(optax.adam(1e-3), rules)) == {"0/nu/b": str(UNSIGNED)}

    def test_smallest_counts_the_whole_array(self):
        found = coded(jlp.optim.quantized_state(optax.sgd(1e-3, 0.9), smallest=1024))
        assert set(found) == {"0/trace/small", "0/trace/stack", "0/trace/w"}

    def test_bfloat16_moments_have_codes_and_stay_bfloat16(self):
        tx = jlp.optim.quantized_state(optax.adam(1e-3, mu_dtype=jnp.bfloat16))
        state = tx.init(params())
        _, state = tx.update(gradients(0), state, params())
        assert state.codes[0].mu["w"].dtype == jnp.uint8 and state.codes[0].mu["b"].dtype == jnp.bfloat16


class TestUpdate:
    def test_bytes_are_those_of_the_specification(self):
        """Two steps: the second decodes what the first has encoded, and draws anew."""
        key = jax.random.key(7)
        inner, p = optax.adam(1e-3), params()
        tx = jlp.optim.quantized_state(inner, {"mu": FIXED}, key=key)
        state, words = tx.init(p), np.asarray(jax.random.key_data(key))
        assert state.step == 0 and not np.any(state.codes[0].nu["w"])
        plain = inner.init(p)
        for step in (1, 2):
            g = gradients(step)
            updates, state = tx.update(g, state, p)
            expected, plain = inner.update(g, plain, p)
            assert_same_bytes(updates, expected)
            for name in ("w", "stack"):
                for field in ("mu", "nu"):
                    x = np.asarray(getattr(plain[0], field)[name])
                    draws = oracle.half_words(x.shape, oracle.leaf_words(words, step, f"0/{name}", 15))
                    q = oracle.encode_fixed(x, draws) if field == "mu" else oracle.encode_relative(x, False, draws)
                    found = getattr(state.codes[0], field)[name], getattr(state.exponents[0], field)[name]
                    assert_same_bytes(found, q)
                    back = oracle.decode_fixed(*q) if field == "mu" else oracle.decode_relative(*q, False)
                    getattr(plain[0], field)[name] = jnp.asarray(back)
        assert state.step == 2 and state.codes[0].count == 2

    def test_init_is_to_nearest_and_not_only_of_zeros(self):
        tx = jlp.optim.quantized_state(optax.contrib.schedule_free_sgd(1e-3), {"z": SIGNED})
        p = {"w": jax.random.normal(jax.random.key(0), (64, 64))}
        state = tx.init(p)
        expected = oracle.encode_relative(np.asarray(p["w"]), True)
        assert_same_bytes((state.codes.z["w"], state.exponents.z["w"]), expected)

    def test_keys_and_leaves_draw_their_own_bits(self):
        p = {"a": jnp.ones((64, 64)), "b": jnp.ones((64, 64))}
        g = {name: gradients(0, {"x": (64, 64)})["x"] for name in p}

        def after(key):
            tx = jlp.optim.quantized_state(optax.sgd(0.1, 0.9), key=key)
            codes = tx.update(g, tx.init(p), p)[1].codes[0].trace
            return [np.asarray(codes[name]).tobytes() for name in p]

        assert len(set(after(0) + after(1) + after(jax.random.key(2)))) == 6
        assert after(0) == after(jax.random.key(0))

    def test_one_transformation_makes_many_states(self):
        """Also after the first one was donated."""
        tx = jlp.optim.quantized_state(optax.adam(1e-3), key=jnp.array([1, 2], jnp.uint32))
        update = jax.jit(tx.update, donate_argnums=1)
        for _ in range(2):
            _, state = update(gradients(0), tx.init(params()), params())
        assert state.step == 1

    def test_keys_in_a_state_stay(self):
        """Those of noise that optax adds; explain_state counts them."""
        key = jax.random.key(3)
        noise = optax.GradientTransformation(lambda p: {"key": key}, lambda g, state, p=None: (g, state))
        tx = jlp.optim.quantized_state(optax.chain(noise, optax.trace(0.9)))
        state = tx.init(params())
        _, after = jax.jit(tx.update)(gradients(0), state, params())
        assert after.codes[0]["key"] == key and after.codes[1].trace["w"].dtype == jnp.int8
        explanation = jlp.optim.explain_state(tx, params())
        assert explanation.leaves[0].nbytes == 8 and explanation.leaves[0].why == str(key.dtype)
        assert explanation.nbytes == sum(x.nbytes for x in jax.tree.leaves(state))


class TestMemory:
    @pytest.mark.parametrize(("bits", "expected"), [(32, 8.06), (24, 7.06), (16, 6.06)])
    def test_bytes_per_parameter(self, bits, expected):
        """Of a parameter and its gradient, bfloat16, and AdamW's state."""
        p = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)}
        tx = jlp.optim.master_weights(jlp.optim.quantized_state(optax.adamw(1e-3)), bits=bits)
        explanation = jlp.optim.explain_state(tx, p)
        assert 2 + 2 + explanation.nbytes / 4096**2 == pytest.approx(expected, abs=0.005)
        made = jax.eval_shape(tx.init, p)
        assert explanation.nbytes == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(made))

    def test_donation_leaves_one_state(self):
        p = {"w": jnp.ones((64, 96), jnp.bfloat16), "b": jnp.ones(64)}
        tx = jlp.optim.master_weights(jlp.optim.quantized_state(optax.adamw(1e-3)))
        state = tx.init(p)

        def step(g, state, p):
            updates, state = tx.update(g, state, p)
            return optax.apply_updates(p, updates), state

        memory = jax.jit(step, donate_argnums=(1, 2)).lower(p, state, p).compile().memory_analysis()
        assert memory.alias_size_in_bytes == sum(x.nbytes for x in jax.tree.leaves((state, p)))


class TestExplain:
    def test_says_why_a_leaf_stays(self):
        tx = optax.chain(
            optax.clip_by_global_norm(1.0),
            jlp.optim.master_weights(jlp.optim.quantized_state(optax.amsgrad(1e-3), {"mu": None})),
        )
        given = {**params(), "half": jnp.ones((64, 64), jnp.bfloat16), "f16": jnp.ones((64, 64), jnp.float16)}
        leaves = {leaf.path: leaf for leaf in jlp.optim.explain_state(tx, given).leaves}
        inside = "1/inner/codes/0"
        assert {name: leaves[f"{inside}/{name}"].why for name in ("nu/b", "nu/small", "nu/f16", "mu/w", "count")} == {
            "nu/b": "a vector",
            "nu/small": "1024 elements; smallest=4096",
            "nu/f16": "float16",
            "mu/w": "kept by rules['mu']",
            "count": "int32",
        }
        assert leaves[f"{inside}/nu_max/w"].why == "no rule names it, so its sign is unknown"
        assert leaves[f"{inside}/nu/w"].code == str(UNSIGNED)
        assert leaves["1/inner/exponents/0/nu/w"].nbytes == 64 * 3
        assert leaves["1/remainders/half"].code == "remainder of 32 bits" and leaves["1/remainders/half"].nbytes == 8192
        table = str(jlp.optim.explain_state(tx, given))
        assert "stays: a vector" in table and table.splitlines()[-1].startswith("all")

    def test_of_a_parameter_without_a_name(self):
        tx = jlp.optim.master_weights(jlp.optim.quantized_state(optax.trace(0.9)))
        found = {leaf.path: leaf.code for leaf in jlp.optim.explain_state(tx, jnp.ones((64, 64), jnp.bfloat16)).leaves}
        assert found["inner/codes/trace"] == str(FIXED) and found["remainders"] == "remainder of 32 bits"

    def test_of_the_wrappers_in_the_other_order(self):
        tx = jlp.optim.quantized_state(jlp.optim.master_weights(optax.adamw(1e-3)))
        p = {"w": jnp.ones((64, 64), jnp.bfloat16)}
        explanation = jlp.optim.explain_state(tx, p)
        assert explanation.nbytes == sum(x.nbytes for x in jax.tree.leaves(tx.init(p)))
        codes = {leaf.path: leaf.code for leaf in explanation.leaves if leaf.code}
        assert codes["codes/inner/0/nu/w"] == str(UNSIGNED)
        assert codes["codes/remainders/w"] == "remainder of 32 bits"

    def test_of_a_state_without_wrappers(self):
        explanation = jlp.optim.explain_state(optax.adam(1e-3), params())
        assert explanation.nbytes == 8 * sum(x.size for x in params().values()) + 4
        assert not any(leaf.code or leaf.why for leaf in explanation.leaves)
        with pytest.raises(TypeError, match="explain_state: tx=3; needs an optax.GradientTransformation"):
            jlp.optim.explain_state(3, params())

    def test_states_outside_of_it_are_as_ever(self):
        tx = jlp.optim.quantized_state(optax.adam(1e-3))
        jlp.optim.explain_state(tx, params())
        assert type(tx.init(params())) is jlp.optim.QuantizedState


class TestErrors:
    def test_rules_that_name_nothing(self):
        tx = jlp.optim.quantized_state(optax.adam(1e-3), {"nuu": UNSIGNED})
        with pytest.raises(ValueError, match=r"rules\['nuu'\] names no field of floats.*last fields are mu, nu: name"):
            tx.init(params())
        for name in ("count", "MuonState.mu"):
            with pytest.raises(ValueError, match=f"rules\\['{name}'\\] names no field of floats"):
                jlp.optim.quantized_state(optax.adam(1e-3), {name: SIGNED}).init(params())

    def test_codes_for_leaves_that_can_have_none(self):
        tx = jlp.optim.quantized_state(optax.adam(1e-3), lambda path, leaf: SIGNED)
        with pytest.raises(TypeError, match="gave signed float8 1x32, stochastic to '0/count', which is int32; codes"):
            tx.init(params())

    def test_arguments(self):
        quantized = jlp.optim.quantized_state
        adam = optax.adam(1e-3)
        with pytest.raises(TypeError, match=r"rules\['nu'\] is 'uint8'; needs jlp.optim.SIGNED"):
            quantized(adam, {"nu": "uint8"})
        with pytest.raises(TypeError, match=r"rules=\['nu'\]; needs a mapping"):
            quantized(adam, ["nu"])
        with pytest.raises(TypeError, match="rules has the key 1; needs names"):
            quantized(adam, {1: SIGNED})
        with pytest.raises(TypeError, match="inner=<class 'int'>; needs an optax.GradientTransformation"):
            quantized(int)
        with pytest.raises(TypeError, match="quantized_state: key=None; needs an int"):
            quantized(adam, key=None)
        with pytest.raises(TypeError, match="key has dtype float32"):
            quantized(adam, key=jnp.ones(2))
        with pytest.raises(ValueError, match="smallest=-1; needs an int from 0 on"):
            quantized(adam, smallest=-1)
        with pytest.raises(TypeError, match=r"rules\('0/mu/b', leaf\) is 3"):
            quantized(adam, lambda path, leaf: 3 if "mu" in path else None).init(params())

    def test_states_that_do_not_fit(self):
        tx = jlp.optim.quantized_state(optax.adam(1e-3))
        state = tx.init(params())
        with pytest.raises(TypeError, match="the state is a tuple; needs the QuantizedState that init"):
            tx.update(gradients(0), optax.adam(1e-3).init(params()), params())
        other = jlp.optim.quantized_state(optax.adam(1e-3), smallest=0)
        needed = (
            "the state has float32[32, 32] at 'codes/0/mu/small'; these parameters and arguments need uint8[32, 32]"
        )
        with pytest.raises(ValueError, match=re.escape(needed)):
            other.update(gradients(0), state, params())
        fixed = jlp.optim.quantized_state(optax.adam(1e-3), {"mu": FIXED})
        with pytest.raises(ValueError, match=r"uint8\[3, 32, 64\] at 'codes/0/mu/stack'.*need int8"):
            fixed.update(gradients(0), state, params())
        with pytest.raises(ValueError, match="made for other parameters or by another transformation"):
            jlp.optim.quantized_state(optax.lion(1e-3)).update(gradients(0), state, params())
        with pytest.raises(ValueError, match="made for other parameters") as found:
            tx.update({str(i): jnp.ones(3) for i in range(1000)}, state)
        assert len(str(found.value)) < 1000

    def test_another_version_is_an_error_or_nan(self):
        tx = jlp.optim.quantized_state(optax.adam(1e-3))
        state = tx.init(params())._replace(version=jnp.int32(2))
        with pytest.raises(ValueError, match="the state has version 2; this jaxlowprec reads version 1"):
            tx.update(gradients(0), state, params())
        assert np.isnan(np.asarray(jax.jit(tx.update)(gradients(0), state, params())[0]["w"])).all()

    def test_a_state_that_changes_its_structure(self):
        class Growing(NamedTuple):
            seen: list

        inner = optax.GradientTransformation(
            lambda params: Growing([]), lambda g, state, params: (g, Growing([*state.seen, g]))
        )
        tx = jlp.optim.quantized_state(inner)
        with pytest.raises(ValueError, match="has 4 leaves after its update and 0 after init"):
            tx.update(gradients(0), tx.init(params()), params())
