"""quantize_matmuls follows parameters that a function joins, masks, pads and repeats, and says where it cannot."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes, random_array
from tests.models.test_quantize_matmuls import with_gradients

MXFP8 = jlp.MXFP8BlockScaling()
NVFP4 = jlp.NVFP4BlockScaling(disable_stochastic_rounding=True)  # whose draws differ between a loop and its rounds
X = random_array((16, 32))


def matrix(seed, *shape):
    return random_array(shape, "float32", seed)


def linear(x, w, name, rules):
    return jlp.linear(x, w, recipe=rules, name=name)


def plain(x, w):
    return x @ w.astype(x.dtype)


def notes_of(function, rules, *args):
    return {layer.path: layer.note for layer in jlp.explain(function, rules, *args).layers}


class TestStacks:
    """Blocks that are stored apart, stacked in the function and run by a scan."""

    BLOCKS = [{"up": matrix(2 * i, 32, 48), "down": matrix(2 * i + 1, 48, 32)} for i in range(4)]
    PARAMS = {"blocks": BLOCKS, "head": matrix(9, 32, 16)}
    KEEP_ENDS = jlp.PerLayer.keep_ends(NVFP4, 4, 1, 1, block="blocks/{}")
    SOME = jlp.PerLayer(((".*/[13]/down", MXFP8), (".*/2/up", None), ("head", None)), NVFP4)

    @staticmethod
    def stacked(parts):
        return jnp.stack(parts)

    def scanned(self, join):
        def function(params, x):
            layers = jax.tree.map(lambda *parts: join(parts), *params["blocks"])

            def body(x, layer):
                return jnp.tanh(plain(jnp.tanh(plain(x, layer["up"])), layer["down"])), x[0]

            x, firsts = lax.scan(jax.checkpoint(body), x, layers)
            return plain(x, params["head"]), firsts

        return function

    @staticmethod
    def unrolled(rules):
        def function(params, x):
            firsts = []
            for i, layer in enumerate(params["blocks"]):
                firsts.append(x[0])
                hidden = jnp.tanh(linear(x, layer["up"], f"blocks/{i}/up", rules))
                x = jnp.tanh(linear(hidden, layer["down"], f"blocks/{i}/down", rules))
            return linear(x, params["head"], "head", rules), jnp.stack(firsts)

        return function

    @pytest.mark.parametrize(
        ("rules", "join"),
        [
            (NVFP4, lambda parts: jnp.stack(parts)),
            (KEEP_ENDS, lambda parts: jnp.stack([part.astype(jnp.bfloat16) for part in parts])),
            (SOME, lambda parts: jnp.concatenate([part[None] for part in parts]).astype(jnp.bfloat16)),
            (SOME, lambda parts: jnp.stack([part.T for part in parts]).transpose(0, 2, 1)),
        ],
        ids=["one recipe", "cast, ends kept", "concatenated, then cast", "transposed"],
    )
    def test_in_a_scan_have_the_bytes_of_unrolled_blocks(self, rules, join):
        theirs = jlp.quantize_matmuls(self.scanned(join), rules)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = with_gradients(theirs)(self.PARAMS, X)
        assert_same_bytes(found, with_gradients(self.unrolled(rules))(self.PARAMS, X))

    def test_each_block_has_its_row(self):
        explained = jlp.explain(self.scanned(self.stacked), self.SOME, self.PARAMS, X)
        names = {
            layer.path: (layer.kernel, str(layer.roles.weight and layer.roles.weight.format))
            for layer in explained.layers
        }
        for i in range(4):
            up, down = names[f"blocks/{i}/up"], names[f"blocks/{i}/down"]
            assert up == ((32, 48), "None" if i == 2 else "NVFP4 16x16")
            assert down == ((48, 32), "MXFP8 E4M3 1x32" if i in (1, 3) else "NVFP4 16x16")

    def test_indexed_by_numbers_each_is_its_own(self):
        def function(params, x):
            ups = jnp.stack([block["up"] for block in params["blocks"]])
            return [plain(x, ups[i]) for i in range(4)]

        expected = [linear(X, self.BLOCKS[i]["up"], f"blocks/{i}/up", self.SOME) for i in range(4)]
        found = jlp.quantize_matmuls(function, jlp.PerLayer(self.SOME.rules[1:], NVFP4))(self.PARAMS, X)
        assert_same_bytes(found, expected)

    def test_fused_inside_the_stack(self):
        """Queries, keys and values become one matrix in each block, and the blocks a stack."""
        blocks = [{name: matrix(10 * i + n, 32, 16) for n, name in enumerate("qkv")} for i in range(3)]
        rules = jlp.PerLayer(((".*/0/.*", None),), MXFP8)

        def function(blocks, x):
            stack = jax.tree.map(lambda *parts: jnp.stack(parts), *blocks)

            def body(x, b):
                y = plain(x, jnp.concatenate([b["q"], b["k"], b["v"]], 1))
                return jnp.tanh(y)[:, :32], y

            return lax.scan(body, x, stack)[1]

        def unrolled(blocks, x):
            products = []
            for i, b in enumerate(blocks):
                products.append(linear(x, jnp.concatenate([b["q"], b["k"], b["v"]], 1), f"b/{i}/q", rules))
                x = jnp.tanh(products[-1])[:, :32]
            return jnp.stack(products)

        theirs = with_gradients(jlp.quantize_matmuls(lambda p, x: function(p["b"], x), rules))({"b": blocks}, X)
        assert_same_bytes(theirs, with_gradients(lambda p, x: unrolled(p["b"], x))({"b": blocks}, X))
        notes = notes_of(lambda p, x: function(p["b"], x), rules, {"b": blocks}, X)
        assert notes["b/2/k"] == "joined with 'b/2/q', 'b/2/v'"
        assert notes["b/0/k"] == "left out by the recipe, joined with 'b/0/q', 'b/0/v'"

    def test_share_one_state_of_delayed_scaling(self):
        recipe = jlp.DelayedScaling(amax_history_len=2)
        function = jlp.quantize_matmuls(self.scanned(self.stacked), recipe)
        states = function.init_state(self.PARAMS, X)
        assert states["_overwrite_with_gradient"].keys() == {"blocks/0/up", "blocks/0/down", "head"}
        run = with_gradients(lambda states, x: function(self.PARAMS, x, scaling_state=states)[0])
        _, (new, _) = run(states, X)
        largest = max(np.abs(block["up"]).max() for block in self.BLOCKS)
        assert new["_overwrite_with_gradient"]["blocks/0/up"]["kernel_amax_history"].tolist() == [largest, 0]


MASK = np.tril(np.ones((32, 48), bool))
FOLLOWED = {
    "concatenated columns": lambda w: jnp.concatenate([w, w[:, :16]], 1),
    "concatenated rows": lambda w: jnp.concatenate([w[16:], w[:16]]),
    "masked": lambda w: jnp.where(MASK, w, 0),
    "tril": jnp.tril,
    "padded": lambda w: jnp.pad(w, ((0, 0), (0, 16))),
    "repeated": lambda w: jnp.repeat(w, 2, axis=1),
    "tiled": lambda w: jnp.tile(w, (1, 2)),
    "rolled": lambda w: jnp.roll(w, 3, 1),
}


class TestSelections:
    """What becomes of one parameter is quantised from the parameter's dtype, as the layer that is given it."""

    @pytest.mark.parametrize("change", FOLLOWED.values(), ids=FOLLOWED)
    def test_has_the_bytes_of_the_layer(self, change):
        params = {"w": matrix(1, 32, 48)}
        expected = jax.vjp(lambda p: linear(X, change(p["w"]), "w", MXFP8), params)
        for cast in (False, True):
            given = (lambda w: w.astype(jnp.bfloat16)) if cast else (lambda w: w)
            theirs = jlp.quantize_matmuls(lambda p, x, given=given: plain(x, change(given(p["w"]))), MXFP8)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                y, back = jax.vjp(lambda p, theirs=theirs: theirs(p, X), params)
            assert_same_bytes((y, back(jnp.ones_like(y))), (expected[0], expected[1](jnp.ones_like(y))))

    def test_parameters_of_one_recipe_are_one_product(self):
        params = {name: matrix(i, 32, 16) for i, name in enumerate("qkvo")}
        fused = lambda p: jnp.concatenate([p["q"], p["k"], p["v"]], -1)  # noqa: E731
        theirs = jlp.quantize_matmuls(lambda p, x: jnp.split(plain(x, fused(p)), 3, -1), NVFP4)
        ours = lambda p, x: jnp.split(linear(x, fused(p), "q", NVFP4), 3, -1)  # noqa: E731
        assert_same_bytes(with_gradients(theirs)(params, X), with_gradients(ours)(params, X))
        assert notes_of(theirs, jlp.FROM_CONTEXT, params, X) == {
            "q": "joined with 'k', 'v'",
            "k": "joined with 'q', 'v'",
            "v": "joined with 'q', 'k'",
            "o": "in no product",
        }

    def test_a_quantised_parameter_is_joined_as_an_array(self):
        a, b = matrix(1, 32, 16), matrix(2, 32, 16)
        packed = jlp.quantize(a, jlp.NVFP4(), axis=-2)
        theirs = jlp.quantize_matmuls(lambda p, x: plain(x, jnp.concatenate([p["a"], p["b"]], 1)), None)
        expected = plain(X, jnp.concatenate([packed.dequantize(), b], 1))
        assert_same_bytes(theirs({"a": packed, "b": b}, X), expected)


def scaled(params, x):
    return plain(x, params["w"] * (1 + params["g"])[:, None])


def masked(params, x):
    return plain(x, params["w"] * params["mask"].astype(jnp.float32))


def normalised(params, x):
    return plain(x, params["w"] / jnp.linalg.norm(params["w"], axis=0))


class TestLeftAlone:
    PARAMS = {"w": matrix(1, 32, 48), "g": matrix(2, 32), "mask": MASK, "v": matrix(3, 32, 8)}

    @pytest.mark.parametrize(
        ("function", "by", "recipe"),
        [(scaled, "mul", MXFP8), (masked, "mul", jlp.Float8BlockScaling()), (normalised, "div", MXFP8)],
    )
    def test_a_computed_parameter_warns_and_has_a_row(self, function, by, recipe):
        theirs = jlp.quantize_matmuls(lambda p, x: (function(p, x), plain(x, p["v"])), recipe)
        with pytest.warns(UserWarning, match=rf"stay in high precision: 'w' \[32, 48\] \(computed .* by {by}\)"):
            found, _ = theirs(self.PARAMS, X)
        assert_same_bytes(found, function(self.PARAMS, X))
        notes = notes_of(theirs, jlp.FROM_CONTEXT, self.PARAMS, X)
        assert notes["w"] == f"computed from the parameter by {by}" and notes["v"] == ""

    def test_the_warning_comes_once_and_names_the_largest(self):
        params = {f"w{i}": matrix(i, 32, 8 * i) for i in range(2, 7)}
        theirs = jlp.quantize_matmuls(lambda p, x: [plain(x, jnp.tanh(w)) for w in p.values()], NVFP4)
        with pytest.warns(UserWarning) as seen:
            theirs(params, X)
            theirs(params, X)
        (text,) = [str(w.message) for w in seen if "high precision:" in str(w.message)]
        assert "'w6' [32, 48]" in text and "'w4'" in text and "'w3'" not in text and "and 2 more" in text

    def test_what_the_rules_leave_out_is_not_named(self, recwarn):
        rules = jlp.PerLayer((("w", None),), MXFP8)
        jlp.quantize_matmuls(lambda p, x: (scaled(p, x), plain(x, p["v"])), rules)(self.PARAMS, X)
        assert not [w for w in recwarn if "high precision" in str(w.message)]

    def test_parameters_of_different_recipes_in_one_product(self):
        rules = jlp.PerLayer((("a", None),), MXFP8)
        params = {name: matrix(i, 32, 16) for i, name in enumerate("abc")}
        fused = lambda p, x: (plain(x, jnp.concatenate([p["a"], p["b"]], 1)), plain(x, p["c"]))  # noqa: E731
        with pytest.warns(UserWarning, match=r"'b' \[32, 16\] \(joined with parameters of other recipes\)"):
            found = jlp.quantize_matmuls(fused, rules)(params, X)
        assert_same_bytes(found[0], fused(params, X)[0])
        assert notes_of(fused, rules, params, X)["b"] == "joined with parameters of other recipes, joined with 'a'"

    def test_a_cache_among_the_parameters_is_no_parameter(self, recwarn):
        """Its rows are activations that were written into it."""

        def function(p, x):
            keys = lax.dynamic_update_slice(p["cache"], plain(x, p["w"])[:1].astype(jnp.float32), (0, 0))
            return x.astype(jnp.float32) @ keys.at[5].set(1).T

        params = {"cache": matrix(1, 16, 32), "w": matrix(2, 32, 32)}
        assert notes_of(function, MXFP8, params, X) == {"w": "", "cache": "not followed through dynamic_update_slice"}
        jlp.quantize_matmuls(function, MXFP8)(params, X)
        assert not [w for w in recwarn if "high precision" in str(w.message)]

    def test_activations_are_no_parameters(self, recwarn):
        """Positions that are added to activations, a learnt token before them, and a choice between them and a row."""
        params = {"pos": matrix(1, 17, 32), "first": matrix(2, 2, 32), "w": matrix(3, 32, 48), "pad": matrix(4, 16, 32)}

        def function(p, x):
            x = jnp.where(x[:, :1] > 0, x, p["pad"].astype(x.dtype))
            x = jnp.concatenate([p["first"][:1].astype(x.dtype), x]) + p["pos"].astype(x.dtype)
            return plain(x, p["w"])

        assert {n for n, note in notes_of(function, MXFP8, params, X).items() if not note} == {"w"}
        jlp.quantize_matmuls(function, MXFP8)(params, X)
        assert not [w for w in recwarn if "high precision" in str(w.message)]
