"""Wrong arguments of linears and mlp: a message says who, what was given, what is needed and what helps."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jaxlowprec as jlp

X = jnp.ones((8, 64), jnp.bfloat16)
GATE, UP, DOWN = jnp.ones((64, 96)), jnp.ones((64, 96)), jnp.ones((96, 64))
KERNELS = [GATE, UP, DOWN]
NVFP4, MXFP8 = jlp.NVFP4BlockScaling(), jlp.MXFP8BlockScaling()
RECIPES = pytest.mark.parametrize("recipe", [None, NVFP4, jlp.Int4QAT(group_size=16)], ids=["none", "nvfp4", "int4"])


def linears(*args, **options):
    return jlp.linears(*args, **{"recipe": NVFP4} | options)


def mlp(*args, **options):
    return jlp.mlp(*args, **{"recipe": NVFP4} | options)


@dataclasses.dataclass(frozen=True)
class Wrong:
    call: object
    error: type
    message: str


OF_LINEARS = [
    Wrong(lambda: linears(X, GATE), TypeError, r"linears: kernels=.*; needs a list or tuple with an element for each"),
    Wrong(lambda: linears(X, []), ValueError, r"linears: kernels is empty; needs one kernel or more"),
    Wrong(
        lambda: linears(X, [GATE, UP], [None]), ValueError, "linears: biases has 1 elements for 2 kernels; needs one"
    ),
    Wrong(lambda: linears(X, [GATE, UP], jnp.ones((2, 96))), TypeError, "linears: biases=.*; needs a list or tuple"),
    Wrong(lambda: linears(X, [GATE, UP], names="ab"), TypeError, "linears: names='ab'; needs a list or tuple"),
    Wrong(lambda: linears(X, [GATE], states=[None, None]), ValueError, "linears: states has 2 elements for 1 kernels"),
    Wrong(
        lambda: linears(X, [GATE], quantized_kernels=[]), ValueError, "linears: quantized_kernels has 0 elements for 1"
    ),
    Wrong(
        lambda: linears(X, [GATE, DOWN]), ValueError, r"linears: x \(8, 64\) and kernel \(96, 64\): needs x \[..., K\]"
    ),
    Wrong(lambda: linears(X, [GATE], [jnp.ones(5)]), ValueError, r"linears: bias has shape \(5,\); needs \(96,\)"),
    Wrong(lambda: linears(X.astype(jnp.int32), [GATE]), TypeError, "linears: x .*int32.*float32"),
    Wrong(lambda: linears(X, [GATE.astype(jnp.int8)]), TypeError, "linears: kernel .*int8.*float32"),
    Wrong(lambda: linears(X, [GATE, UP], recipe="nvfp4"), TypeError, "linears: recipe='nvfp4'"),
    Wrong(lambda: linears(X, [GATE, UP], key=5), TypeError, "linears: key=5"),
    Wrong(lambda: linears(X, [GATE, UP], names=["a", 5]), TypeError, "linears: name=5; needs a string"),
    Wrong(lambda: linears(X, [GATE, UP], out_sharding="a"), TypeError, "linears: out_sharding='a'"),
    Wrong(lambda: linears(X, [GATE, None]), ValueError, "linears: kernel is None; without quantized_kernel="),
    Wrong(
        lambda: linears(X, [GATE], quantized_kernels=[GATE]), TypeError, "linears: quantized_kernel=.*quantize_kernel"
    ),
    Wrong(
        lambda: linears(X, [GATE, UP], quantized_kernels=[None, jlp.quantize_kernel(UP, MXFP8)]),
        ValueError,
        "linears: quantized_kernel is MXFP8 .* the recipe wants NVFP4 .*; quantise it again under this recipe",
    ),
]
OF_MLP = [
    Wrong(
        lambda: mlp(X, KERNELS, activation="relu"),
        ValueError,
        "mlp: activation='relu'; needs one of 'geglu', .*'swiglu', or a function such as jnp.tanh",
    ),
    Wrong(lambda: mlp(X, KERNELS, activation=5), ValueError, "mlp: activation=5; needs one of 'geglu'"),
    Wrong(lambda: mlp(X, KERNELS, activation=["swiglu"]), ValueError, r"mlp: activation=\['swiglu'\]; needs one of"),
    Wrong(
        lambda: mlp(X, KERNELS, saved="all"), ValueError, "mlp: saved='all'; needs .quantized., .8bit. or .recompute."
    ),
    Wrong(lambda: mlp(X, KERNELS, saved=8), ValueError, "mlp: saved=8; needs"),
    Wrong(
        lambda: mlp(X, [GATE, DOWN]),
        ValueError,
        "mlp: 2 kernels; activation='swiglu' needs 3: gate, up and down",
    ),
    Wrong(
        lambda: mlp(X, KERNELS, activation="gelu"), ValueError, "mlp: 3 kernels; activation='gelu' needs 2: up and down"
    ),
    Wrong(
        lambda: mlp(X, [GATE], activation=jnp.tanh),
        ValueError,
        "mlp: 1 kernels; needs gate, up and down, or up and down",
    ),
    Wrong(lambda: mlp(X, []), ValueError, "mlp: 0 kernels; activation='swiglu' needs 3: gate, up and down"),
    Wrong(lambda: mlp(X, GATE), TypeError, "mlp: kernels=.*; needs a list or tuple"),
    Wrong(
        lambda: mlp(X, KERNELS, [None, None]),
        ValueError,
        "mlp: biases has 2 elements for 3 kernels; needs one for each",
    ),
    Wrong(lambda: mlp(X, KERNELS, names=("a",)), ValueError, "mlp: names has 1 elements for 3 kernels"),
    Wrong(lambda: mlp(X.astype(jnp.int32), KERNELS), TypeError, "mlp: x .*int32.*float32"),
    Wrong(lambda: mlp(X, [GATE, UP, DOWN.astype(jnp.int8)]), TypeError, "mlp: kernel .*int8.*float32"),
    Wrong(lambda: mlp(X, KERNELS, out_sharding=5), TypeError, "mlp: out_sharding=5"),
    Wrong(lambda: mlp(X, KERNELS, recipe=jlp.DelayedScaling()), ValueError, "mlp: .*state.*init_state"),
]


@pytest.mark.parametrize("wrong", OF_LINEARS + OF_MLP, ids=lambda wrong: wrong.message[:40])
def test_messages_say_what_is_needed(wrong):
    with pytest.raises(wrong.error, match=wrong.message):
        wrong.call()


@RECIPES
@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        ([GATE, UP[:, :80], DOWN], "mlp: gate has 96 features and up 80; needs the same number"),
        ([GATE, UP, DOWN[:80]], r"mlp: x \(8, 96\) and kernel \(80, 64\): needs x \[..., K\] and kernel \[K, N\]"),
        ([GATE[:48], UP, DOWN], r"mlp: x \(8, 64\) and kernel \(48, 96\): needs x"),
    ],
)
def test_kernels_that_do_not_fit_each_other(recipe, kernels, message):
    """The same message whether or not the products are quantised."""
    with pytest.raises(ValueError, match=message):
        mlp(X, kernels, recipe=recipe)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda x: mlp(x, kernels, recipe=recipe), X)


@RECIPES
@pytest.mark.parametrize(
    ("activation", "gives"),
    [
        (lambda gate, up: (gate * up)[..., :48], r"bfloat16 \(8, 48\); needs bfloat16 \(8, 96\)"),
        (lambda gate, up: jnp.tanh(gate.astype(jnp.float32)) * up, r"float32 \(8, 96\); needs bfloat16 \(8, 96\)"),
    ],
    ids=["shape", "dtype"],
)
@pytest.mark.parametrize("saved", ["quantized", "8bit"])
def test_functions_that_are_not_elementwise(recipe, saved, activation, gives):
    message = f"mlp: activation=.* gives {gives}, as its operands: cast the result, or compute it elementwise"
    with pytest.raises(ValueError, match=message):
        mlp(X, KERNELS, recipe=recipe, saved=saved, activation=activation)
