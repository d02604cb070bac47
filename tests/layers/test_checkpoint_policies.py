"""checkpoint_policies: what jax.checkpoint keeps of the layers and what it computes again; bytes stay the same."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes, often, random_array
from tests.products import calls_of, kept, native_calls

OURS, JAXS = jlp.checkpoint_policies, jax.checkpoint_policies
RECIPES = {
    "nvfp4": jlp.NVFP4BlockScaling(),
    "mxfp8": jlp.MXFP8BlockScaling(),
    "fp8_current": jlp.Float8CurrentScaling(),
    "decoded": jlp.MXFP8BlockScaling(backward_override="dequantized"),
    "int4_qat": jlp.Int4QAT(group_size=32),
}
POLICIES = {
    "save_quantized": OURS.save_quantized,
    "save_products": OURS.save_products,
    "save_quantized_and_products": OURS.save_quantized_and_products,
    "offload": OURS.offload(),
    "offload products": OURS.offload([OURS.PRODUCT], save=[OURS.QUANTIZED_INPUT, OURS.QUANTIZED_WEIGHT]),
    "with JAX's": JAXS.save_from_both_policies(OURS.save_quantized_and_products, JAXS.dots_saveable),
}
T, K = 32, 64
QUANTIZE, MULTIPLY = "jaxlowprec_quantize", "jaxlowprec_scaled_matmul"


def by(choices):
    return pytest.mark.parametrize("policy", choices.values(), ids=choices.keys())


def layers(policy, recipe, calls=2):
    """Layers of that many linears, each followed by what its gradient needs the product for; scanned."""

    def layer(x, ws):
        for w in ws:
            x = jnp.sin(jlp.linear(x, w, recipe=recipe))
        return x, None

    remat = layer if policy is None else jax.checkpoint(layer, policy=policy)
    return lambda x, ws: jax.lax.scan(remat, x, ws)[0]


def step(function):
    """The result and all gradients, for a given gradient of the result."""

    def run(dy, *args):
        y, pullback = jax.vjp(function, *args)
        return y, *pullback(dy)

    return run


def operands():
    return random_array((T, K)), random_array((2, 2, K, K), "float32", 1), random_array((T, K), "bfloat16", 2)


@functools.cache
def results_of(policy, recipe):
    options = {"xla_allow_excess_precision": False} if isinstance(recipe, jlp.Int4QAT) else None
    x, ws, dy = operands()
    return jax.jit(step(layers(policy, recipe)), compiler_options=options)(dy, x, ws)


@by(POLICIES)
@pytest.mark.parametrize("recipe", often([RECIPES["nvfp4"]], RECIPES.values()), ids=RECIPES.keys())
def test_every_policy_gives_the_same_bytes(policy, recipe):
    """XLA computes QAT's wgrad, and may drop the rounding of an input that it computes again: here it must not."""
    assert_same_bytes(results_of(policy, recipe), results_of(None, recipe))


@functools.cache
def calls_under(policy):
    """Of MXFP8's kernels: whatever the recipe, a layer names its operands and its product in one place."""
    x, ws, dy = operands()
    return native_calls(step(layers(policy, RECIPES["mxfp8"])), dy, x, ws)


class TestWhatRunsAgain:
    """In a scan over layers of two linears, whose forward pass quantises four operands and has two GEMMs."""

    @pytest.mark.parametrize(
        ("policy", "quantizations", "gemms"),
        [
            (JAXS.nothing_saveable, 4, 2),
            (JAXS.dots_saveable, 4, 2),
            (OURS.save_quantized, 4, 2),
            (OURS.save_products, 4, 0),
            (OURS.save_quantized_and_products, 0, 0),
            (OURS.offload(), 0, 0),
            (JAXS.save_from_both_policies(OURS.save_quantized_and_products, JAXS.dots_saveable), 0, 0),
        ],
    )
    def test_of_a_recipe(self, policy, quantizations, gemms):
        calls, plain = (calls_under(p) for p in (policy, None))
        assert (calls[QUANTIZE] - plain[QUANTIZE], calls[MULTIPLY] - plain[MULTIPLY]) == (quantizations, gemms)

    def test_a_product_that_nothing_reads_runs_once(self):
        """Its quantised operands are all that save_quantized has to keep."""
        x, ws, dy = operands()

        def layer(x, w):
            return x + jlp.linear(x, w, recipe=RECIPES["mxfp8"]), None

        def scanned(policy):
            remat = layer if policy is None else jax.checkpoint(layer, policy=policy)
            return step(lambda x, ws: jax.lax.scan(remat, x, ws)[0])

        ws = np.asarray(ws)[:, 0]
        calls = {p: native_calls(scanned(p), dy, x, ws) for p in (None, OURS.save_quantized)}
        assert calls[OURS.save_quantized] == calls[None]
        again = native_calls(scanned(JAXS.nothing_saveable), dy, x, ws)
        assert again[QUANTIZE] == calls[None][QUANTIZE] + 2 and again[MULTIPLY] == calls[None][MULTIPLY]


class TestWhatIsKept:
    def of(self, policy, recipe=RECIPES["nvfp4"]):
        """Dtypes and shapes."""
        x, ws, _ = operands()
        block = jax.checkpoint(lambda x, w: jnp.sin(jlp.linear(jnp.sin(x), w, recipe=recipe)), policy=policy)
        return {(leaf.dtype.name, leaf.shape) for leaf in kept(block, x, np.asarray(ws)[0, 0])}

    codes = {("uint8", (K, T // 2)), ("uint8", (K, K // 2))}
    product = ("bfloat16", (T, K))

    def test_of_a_recipe(self):
        assert not self.of(JAXS.nothing_saveable) & self.codes
        assert self.of(OURS.save_quantized) >= self.codes
        assert not self.of(OURS.save_products) & self.codes
        assert self.of(OURS.save_quantized_and_products) >= self.codes

    @pytest.mark.parametrize("product", ["linear", "dot_general", "einsum", "grouped"])
    @pytest.mark.parametrize("recipe", [None, *RECIPES.values()], ids=["none", *RECIPES.keys()])
    def test_the_product_itself(self, product, recipe):
        """Of T x 2K numbers, as nothing else is."""
        x, w = random_array((T, K)), random_array((K, 2 * K), "float32", 1)
        functions = {
            "linear": lambda x, w: jlp.linear(x, w, recipe=recipe),
            "dot_general": lambda x, w: jlp.dot_general(
                x, w, (((1,), (0,)), ((), ())), None, "bfloat16", recipe=recipe
            ),
            "einsum": lambda x, w: jlp.einsum("tk,kn->tn", x, w.astype(x.dtype), recipe=recipe),
            "grouped": lambda x, w: jlp.grouped_matmul(x, w[None], jnp.array([T]), recipe=recipe),
        }

        def found(policy):
            block = jax.checkpoint(lambda x, w: jnp.sin(functions[product](x, w)), policy=policy)
            return ("bfloat16", (T, 2 * K)) in {(leaf.dtype.name, leaf.shape) for leaf in kept(block, x, w)}

        assert found(OURS.save_products) and found(OURS.save_quantized_and_products)
        assert not found(OURS.save_quantized) and not found(JAXS.nothing_saveable)

    def test_offloaded_arrays_go_to_host_memory(self):
        x, ws, dy = operands()
        to_host = OURS.offload([OURS.PRODUCT], save=[OURS.QUANTIZED_INPUT])
        for policy, moves in ((to_host, True), (OURS.save_quantized_and_products, False)):
            traced = jax.jit(step(layers(policy, RECIPES["nvfp4"]))).trace(dy, x, ws)
            assert (f"bf16<host>[{T},{K}]" in str(traced.jaxpr)) == moves
            assert ("pinned_host" in traced.lower(lowering_platforms=("cuda",)).as_text()) == moves


class TestEither:
    """A plain product, T x 3K, then one of a layer, T x 2K."""

    def kept(self, policy):
        def block(x, v, w):
            return jnp.sin(jlp.linear(jnp.sin(x @ v), w, recipe=RECIPES["mxfp8"]))

        x, v, w = random_array((T, K)), random_array((K, 3 * K), seed=1), random_array((3 * K, 2 * K), "float32", 2)
        shapes = {leaf.shape for leaf in kept(jax.checkpoint(block, policy=policy), x, v, w)}
        return (T, 3 * K) in shapes, (T, 2 * K) in shapes

    def test_it_keeps_what_either_keeps(self):
        dots, ours = JAXS.dots_with_no_batch_dims_saveable, OURS.save_products
        assert self.kept(dots) == (True, False) and self.kept(ours) == (False, True)
        for policy in (OURS.either(dots, ours), OURS.either(ours, dots), JAXS.save_from_both_policies(ours, dots)):
            assert self.kept(policy) == (True, True)

    def test_it_takes_policies_that_offload(self):
        dots, offload = JAXS.dots_with_no_batch_dims_saveable, OURS.offload()
        for policy in (OURS.either(dots, offload), OURS.either(offload, dots)):
            assert self.kept(policy) == (True, True)
        with pytest.raises(ValueError, match="should be a boolean"):
            self.kept(JAXS.save_from_both_policies(dots, offload))


class TestLayers:
    """A block of two layers under remat, repeated by a scan, in both Flax libraries; and experts."""

    def check(self, run, params, x):
        """`run(policy)` is a function of params and x. Without recomputation it has 8 quantisations and 6 GEMMs."""
        dy = random_array(x.shape, "bfloat16", 5)
        with jlp.autocast(RECIPES["nvfp4"]):
            plain, counts = jax.jit(step(run(None)))(dy, params, x), {}
            for policy in (None, JAXS.nothing_saveable, *POLICIES.values()):
                compiled = jax.jit(step(run(policy))).lower(dy, params, x).compile()
                counts[policy] = calls_of(compiled)
                assert_same_bytes(compiled(dy, params, x), plain)
        both = OURS.save_quantized_and_products
        assert counts[both] == counts[None] == counts[POLICIES["offload"]]
        again = {
            name: counts[p] - counts[None] for name, p in (("none", JAXS.nothing_saveable), ("y", OURS.save_products))
        }
        assert again["none"][MULTIPLY] == 2 and again["y"][MULTIPLY] == 0
        assert again["none"][QUANTIZE] == again["y"][QUANTIZE] == 4

    @pytest.mark.slow
    def test_linen(self):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                for name in ("up", "down"):
                    x = jnp.sin(jlp.linen.Dense(K, use_bias=False, dtype=jnp.bfloat16, name=name)(x))
                return x, None

        def model(policy):
            block = nn.remat(Block, policy=policy, prevent_cse=False) if policy else Block
            return nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()

        x = random_array((T, K))
        variables = model(None).init(jax.random.key(0), x, None)
        self.check(lambda policy: lambda v, x: model(policy).apply(v, x, None)[0], variables, x)

    @pytest.mark.slow
    def test_nnx(self):
        class Block(nnx.Module):
            def __init__(self, rngs):
                self.up, self.down = (jlp.nnx.Linear(K, K, use_bias=False, dtype=jnp.bfloat16, rngs=rngs) for _ in "ab")

            def __call__(self, x):
                return jnp.sin(self.down(jnp.sin(self.up(x))))

        @nnx.vmap(in_axes=0, out_axes=0)
        def make(key):
            return Block(nnx.Rngs(key))

        graph, params = nnx.split(make(jax.random.split(jax.random.key(0), 3)))

        def run(policy):
            call = nnx.remat(Block.__call__, policy=policy) if policy else Block.__call__

            def apply(params, x):
                return nnx.scan(lambda x, block: call(block, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                    x, nnx.merge(graph, params)
                )

            return apply

        self.check(run, params, random_array((T, K)))

    @pytest.mark.sampled(5)
    @by(POLICIES)
    def test_experts(self, policy):
        x, dy = random_array((T, K)), random_array((T, K), "bfloat16", 2)
        ws, sizes = random_array((2, 2, 4, K, K), "float32", 1), jnp.array([5, 0, 20, 7])

        def compiled(policy):
            def layer(x, ws):
                for w in ws:
                    x = jnp.sin(jlp.grouped_matmul(x, w, sizes, recipe=RECIPES["nvfp4"]))
                return x, None

            remat = layer if policy is None else jax.checkpoint(layer, policy=policy)
            return jax.jit(step(lambda x, ws: jax.lax.scan(remat, x, ws)[0])).lower(dy, x, ws).compile()

        ours, without = (compiled(p) for p in (policy, None))
        assert_same_bytes(ours(dy, x, ws), without(dy, x, ws))
        names = ("jaxlowprec_grouped_quantize", QUANTIZE, "jaxlowprec_grouped_matmul")
        calls, plain = calls_of(ours), calls_of(without)
        again = tuple(calls[name] - plain[name] for name in names)
        expected = {OURS.save_quantized: (2, 2, 2), OURS.save_products: (2, 2, 0)}
        assert again == expected.get(policy, (0, 0, 0))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: OURS.offload("jaxlowprec_product"), TypeError, "offload: names='jaxlowprec_product'; needs a list"),
        (lambda: OURS.offload([OURS.PRODUCT], save=[1]), TypeError, r"offload: save=\[1\]; needs a list of names"),
        (lambda: OURS.offload(save=[OURS.PRODUCT]), ValueError, "jaxlowprec_product is in names and in save"),
        (lambda: OURS.offload(offload_dst=5), TypeError, "offload: offload_dst=5; needs a string"),
        (lambda: OURS.either(OURS.save_products, "dots"), TypeError, "either: policy_2='dots'; needs a policy"),
    ],
)
def test_errors_say_what_is_needed(call, error, message):
    with pytest.raises(error, match=message):
        call()
