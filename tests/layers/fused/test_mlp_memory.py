"""What mlp keeps for its backward pass, to the byte; what it computes again there; and what a compiled step holds."""

import functools

import jax
import pytest

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes
from tests.layers.fused.layers import (
    KEEP_BARRIERS,
    MULTIPLY,
    QUANTIZE,
    SAVED,
    composed_mlp,
    gradients_of_layers,
    loss_of_layers,
    mlp_operands,
    nbytes,
    separate_mlp,
    traced_calls,
    weights,
)
from tests.products import calls_of, kept

NVFP4, MXFP8, FP8 = jlp.NVFP4BlockScaling(), jlp.MXFP8BlockScaling(), jlp.Float8CurrentScaling()
T, K, F, N = 64, 32, 96, 48
ACTIVATE = "jaxlowprec_activation"
OURS, JAXS = jlp.checkpoint_policies, jax.checkpoint_policies


def ways(recipe):
    """Separate layers, and an MLP for each way to save."""
    saving = {saved: functools.partial(jlp.mlp, recipe=recipe, saved=saved) for saved in SAVED}
    return {"separate": functools.partial(separate_mlp, recipe=recipe), **saving}


def nvfp4_bytes(rows, columns, tiles=False):
    """Codes and scales of blocks of 16, or of tiles of 16 by 16."""
    return rows * columns // 2 + rows * columns // (256 if tiles else 16)


class TestBytesKept:
    def of(self, recipe, **given):
        x, kernels, _, _ = mlp_operands((T, K), F, N)
        return {name: nbytes(kept(functools.partial(f, **given), x, kernels)) for name, f in ways(recipe).items()}

    def test_under_nvfp4(self):
        always = nvfp4_bytes(K, T)  # x along tokens; and kernels along their features
        always += 2 * nvfp4_bytes(K, F, tiles=True) + nvfp4_bytes(F, N, tiles=True)
        assert self.of(NVFP4) == {
            "separate": always + nvfp4_bytes(K, T) + 2 * 2 * T * F + nvfp4_bytes(F, T),
            "quantized": always + 2 * 2 * T * F,
            "8bit": always + 2 * (T * F + T * F // 32),
            "recompute": always + nvfp4_bytes(T, K) + 2 * nvfp4_bytes(F, K, tiles=True),
        }

    def test_under_mxfp8(self):
        def size(rows, columns):
            return rows * columns + rows * columns // 32

        always = size(K, T) + 2 * size(K, F) + size(F, 64)  # blocks of N = 48 are padded to whole ones
        always -= size(F, 64) - F * N - F * 2
        found = self.of(MXFP8)
        assert found["quantized"] == always + 2 * 2 * T * F
        assert found["8bit"] == always + 2 * size(T, F)
        assert found["recompute"] == always + size(T, K) + 2 * size(F, K)

    @pytest.mark.parametrize("recipe", [jlp.Int4QAT(group_size=16), None], ids=["int4_qat", "none"])
    def test_where_inputs_are_not_quantised(self, recipe):
        """Of the hidden layer: gate, up and the activation, of two bytes; gate and up in 8 bits; or nothing."""
        x, kernels, _, _ = mlp_operands((T, K), F, N)
        found = {
            name: sorted(leaf.dtype.name for leaf in kept(f, x, kernels) if leaf.shape == (T, F))
            for name, f in ways(recipe).items()
        }
        assert found == {
            "separate": ["bfloat16"] * 3,
            "quantized": ["bfloat16"] * 2,
            "8bit": ["bfloat16", "uint8", "uint8"],
            "recompute": [],
        }

    def test_of_an_activation_with_one_operand(self):
        x, kernels, _, _ = mlp_operands((T, K), F, N, gated=False)
        found = {
            saved: nbytes(
                kept(lambda x, w, s=saved: jlp.mlp(x, w, None, NVFP4, activation="gelu", saved=s), x, kernels)
            )
            for saved in SAVED
        }
        assert found["quantized"] - found["8bit"] == 2 * T * F - T * F - T * F // 32
        assert found["quantized"] - found["recompute"] == (
            2 * T * F - nvfp4_bytes(T, K) - nvfp4_bytes(F, K, tiles=True)
        )


def gradient_of(function):
    def run(x, kernels, dy):
        y, pullback = jax.vjp(function, x, kernels)
        return y, pullback(dy)

    return run


def compiled_calls(function, *args):
    """Kernels that a gradient's compiled program calls where XLA's CPU compiler keeps barriers."""
    return calls_of(jax.jit(gradient_of(function)).lower(*args).compile(compiler_options=KEEP_BARRIERS))


class TestWhatRunsAgain:
    """Nine GEMMs, and quantisations of x, the activation, three kernels and three gradients."""

    wanted = {
        "separate": (9, 8, 1),
        "quantized": (9, 9, 2),
        "8bit": (9, 11, 2),  # gate and up to eight bits
        "recompute": (11, 9, 2),
    }

    @pytest.mark.slow
    @pytest.mark.parametrize("recipe", [NVFP4, MXFP8], ids=["nvfp4", "mxfp8"])
    def test_a_barrier_parts_both_passes(self, recipe):
        """XLA does not take from the forward pass what the backward pass is to compute again. Under MXFP8 an MLP's
        activation, twice, and its two gradients are quantised by the calls that make them."""
        x, kernels, _, dy = mlp_operands((T, K), F, N)
        for way, function in ways(recipe).items():
            calls, (products, quantized, activated) = compiled_calls(function, x, kernels, dy), self.wanted[way]
            in_one_pass = recipe is MXFP8 and way != "separate"
            expected = (products, quantized - 4, 0) if in_one_pass else (products, quantized, activated)
            assert (calls[MULTIPLY], calls[QUANTIZE], calls[ACTIVATE]) == expected, way
            assert calls[f"{ACTIVATE}_quantize"] == (activated if in_one_pass else 0)
            assert calls[f"{ACTIVATE}_gradient" + "_quantize" * in_one_pass] == 1

    @pytest.mark.parametrize("recipe", [None, jlp.Int4QAT(group_size=16)], ids=["none", "int4_qat"])
    def test_where_inputs_are_not_quantised(self, recipe):
        x, kernels, _, dy = mlp_operands((T, K), F, N)
        calls = {name: compiled_calls(f, x, kernels, dy) for name, f in ways(recipe).items()}
        assert {name: found[ACTIVATE] for name, found in calls.items()} == {
            "separate": 1,
            "quantized": 2,
            "8bit": 1,
            "recompute": 2,
        }
        products = {name: found["jaxlowprec_weight_only_matmul"] for name, found in calls.items()}
        assert products["recompute"] - products["separate"] == (0 if recipe is None else 2)
        assert products["quantized"] == products["separate"]

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("way", wanted)
    def test_in_a_scan_everywhere(self, way):
        """Its forward and its backward pass are loops of their own, as XLA's CPU compiler sees them, too."""
        x, kernels = stacked(3)
        loss = loss_of_layers(ways(FP8)[way])
        calls = calls_of(jax.jit(jax.grad(loss)).lower(kernels, x).compile())
        assert (calls[MULTIPLY], calls[QUANTIZE], calls[ACTIVATE]) == self.wanted[way]


def stacked(layers, t=T, k=K, f=F):
    x, kernels, _, _ = mlp_operands((t, k), f, k)
    return x, [weights((layers, *w.shape), 7 + i) for i, w in enumerate(kernels)]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("recipe", [NVFP4, MXFP8], ids=["nvfp4", "mxfp8"])
def test_a_training_step_holds_less_and_less(recipe):
    """By what a layer keeps, eight times."""
    x, kernels = stacked(8, 512, 64, 256)
    one = [w[0] for w in kernels]
    temporary, keeps = {}, {}
    for name, function in ways(recipe).items():
        compiled = jax.jit(jax.grad(loss_of_layers(function))).lower(kernels, x).compile()
        temporary[name] = compiled.memory_analysis().temp_size_in_bytes
        keeps[name] = nbytes(kept(function, x, one))
    order = list(ways(recipe))
    for more, less in zip(order, order[1:], strict=False):
        assert temporary[more] - temporary[less] > 0.8 * 8 * (keeps[more] - keeps[less]) > 0, (temporary, keeps)


@functools.cache
def gradients(saved, policy=None):
    function = functools.partial(jlp.mlp, recipe=FP8, saved=saved)
    return gradients_of_layers(function, policy, *stacked(2))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("policy", ["nothing_saveable", "save_quantized", "save_products", "offload"])
@pytest.mark.parametrize("saved", SAVED)
def test_checkpointed_mlps_have_the_same_bits(policy, saved):
    """`quantized` and `recompute` have the same bits, too."""
    without = "quantized" if saved == "recompute" else saved
    assert_same_bytes(gradients(saved, policy), gradients(without))


def test_policies_keep_what_the_mlp_keeps_quantised():
    """With save_quantized x and the kernels are kept in four bits, and gate and up are multiplied again."""
    x, kernels, _, dy = mlp_operands((T, K), F, N)

    def calls(policy):
        function = jax.checkpoint(functools.partial(jlp.mlp, recipe=FP8), policy=policy)
        return traced_calls(gradient_of(function), x, kernels, dy)

    nothing, quantized = calls(JAXS.nothing_saveable), calls(OURS.save_quantized)
    both = calls(OURS.save_quantized_and_products)
    assert nothing[MULTIPLY] - both[MULTIPLY] == quantized[MULTIPLY] - both[MULTIPLY] == 2
    assert both[QUANTIZE] < nothing[QUANTIZE]


def test_without_a_gradient_it_calls_what_linears_call():
    """Without a gradient an MLP quantises five tensors and multiplies three times, as linears and linear do; its
    activation brings its own amax."""
    x, kernels, _, _ = mlp_operands((T, K), F, N)
    for function, amaxes in ((jlp.mlp, 4), (composed_mlp, 5)):
        calls = traced_calls(functools.partial(function, recipe=NVFP4), x, kernels)
        assert (calls[QUANTIZE], calls[MULTIPLY], calls["jaxlowprec_amax"]) == (5, 3, amaxes)
