"""What is called with hostile arguments: fused layers, whole models, optimizers, adapters and what is told of a run."""

import functools

from flax import nnx

import jaxlowprec as jlp
from jaxlowprec import rl
from tests.hostile.recipes.call import call_of
from tests.hostile.recipes.values import Asked, value


def _loss(params, x):
    return (x @ params["up"].T).sum()


def _given():
    return {"up": value("x")}, value("x")


def _transformed(**options):
    return jlp.quantize_matmuls(_loss, **{"rules": jlp.MXFP8BlockScaling()} | options)(*_given())


def _measured(**options):
    function = jlp.quantize_matmuls(_loss, jlp.MXFP8BlockScaling())
    return jlp.telemetry.value_and_grad(function, **options)(*_given())


def _by_layer(**options):
    return jlp.linear(value("x"), value("x.T"), recipe=jlp.PerLayer(**options), name="up")


def _refuse_functions(*arguments):
    """What a user's function does is its own affair."""
    if any(map(callable, arguments)):
        raise Asked


def _optimizer(make):
    def call(learning_rate, mask=None, **options):
        _refuse_functions(learning_rate, mask)
        tx, params = make(learning_rate, mask=mask, **options), _given()[0]
        return tx.update(params, tx.init(params), params)

    return call


def _wrapper(make):
    def call(inner, **options):
        tx, params = make(inner, **options), _given()[0]
        return jlp.optim.apply_gradients(tx, params, tx.init(params), params)

    return call


def _fused(function):
    @functools.wraps(function)
    def call(*, activation="swiglu", **options):
        _refuse_functions(activation)
        return function(activation=activation, **options)

    return call


def _layers(*sizes):
    return [nnx.Linear(*size, rngs=nnx.Rngs(0)) for size in sizes]


def _mlp_of_modules(**options):
    return jlp.nnx.mlp(value("x"), _layers((32, 16), (32, 16), (16, 32)), **options)


_OF_MLP = ("biases", "key", "activation", "saved", "quantized_kernels", "names", "states", "precision")
MODEL_CALLS = (
    *(call_of(getattr(jlp, name), x="x") for name in ("silu", "gelu", "relu_squared")),
    *(call_of(getattr(jlp, name), gate="x", up="x") for name in ("swiglu", "geglu")),
    *(call_of(getattr(jlp, name), x="x", gamma="gamma") for name in ("rms_norm", "layer_norm")),
    call_of(jlp.linears, "linear", x="x", kernels="two kernels", recipe="MXFP8BlockScaling()"),
    call_of(
        _fused(jlp.mlp), "linear", "linears", others=_OF_MLP, x="x", kernels="kernels", recipe="MXFP8BlockScaling()"
    ),
    call_of(
        _fused(jlp.grouped_mlp),
        "grouped_matmul",
        "linear",
        others=_OF_MLP,
        x="x",
        kernels="expert kernels",
        group_sizes="int32",
        recipe="MXFP8BlockScaling()",
    ),
    call_of(lambda x: jlp.nnx.linears(x, _layers((32, 16))), "Linear", "linear", name="linears", x="x"),
    call_of(_mlp_of_modules, name="mlp", others=("saved",)),
    call_of(jlp.nnx.convert, traced=False, model="model"),
    call_of(jlp.linen.convert, module="Linen module"),
    call_of(jlp.KVCache),
    call_of(_by_layer, "linear", name="PerLayer", rules="rules", others=("default", "exclude", "stacks")),
    call_of(jlp.Sums),
    call_of(jlp.supported, recipe="MXFP8BlockScaling()"),
    call_of(_transformed, "dot_general", name="quantize_matmuls", others=("rules", "params", "names")),
    call_of(
        lambda **options: jlp.accumulate_gradients(_loss, **options)(*_given()),
        name="accumulate_gradients",
        microbatches="2",
        others=("has_aux",),
    ),
    call_of(
        lambda **options: jlp.find_policy(_loss, _given()[0], (), **options),  # the last thing that it refuses
        name="find_policy",
        candidates="MXFP8BlockScaling()",
        budget="0.5",
        others=("cost", "by", "repeats", "progress"),
        traced=False,
    ),
    call_of(
        _optimizer(jlp.optim.adamw),
        name="adamw",
        learning_rate="0.5",
        others=("b1", "b2", "eps", "weight_decay", "mask"),
    ),
    call_of(_optimizer(jlp.optim.lion), name="lion", learning_rate="0.5", others=("b1", "b2", "weight_decay", "mask")),
    call_of(
        _wrapper(jlp.optim.quantized_state),
        "apply_gradients",
        name="quantized_state",
        inner="adamw",
        others=("rules", "key", "smallest"),
    ),
    call_of(
        _wrapper(jlp.optim.master_weights),
        "apply_gradients",
        name="master_weights",
        inner="adamw",
        others=("bits", "key"),
    ),
    call_of(jlp.optim.explain_state, tx="8-bit adamw", params="parameters"),
    call_of(
        lambda state: jlp.optim.apply_gradients(value("8-bit adamw"), _given()[0], state, _given()[0]),
        "quantized_state",
        name="apply_gradients",
        state="its state",
    ),
    call_of(
        jlp.optim.convert_state,
        "quantized_state",
        state="state of adamw",
        params="parameters",
        source="adamw",
        target="8-bit adamw",
    ),
    call_of(
        lambda signed, **options: jlp.optim.RelativeCode(signed, **options).encode(value("x")),
        name="RelativeCode",
        signed="True",
        others=("rounding",),
    ),
    call_of(
        lambda **options: jlp.optim.FixedCode(**options).encode(value("x")), name="FixedCode", others=("rounding",)
    ),
    *(
        call_of(function, trainer="log-probabilities", engine="log-probabilities")
        for function in (rl.masked_weights, rl.truncated_weights, rl.mismatch)
    ),
    call_of(jlp.lora.init, "lora", key="key", params="parameters", rank="2"),
    *(call_of(call, "lora", params="parameters", adapters="adapters") for call in (jlp.lora.apply, jlp.lora.merge)),
    call_of(jlp.nnx.merge_lora, traced=False, model="model"),
    call_of(jlp.kv.scale_of, amax="log-probabilities"),
    call_of(jlp.checkpoint_policies.offload),
    call_of(jlp.checkpoint_policies.either, policy_1="a function", policy_2="a function"),
    call_of(jlp.telemetry.Limits),
    call_of(_measured, "telemetry", name="value_and_grad", others=("on", "what_if")),
    call_of(jlp.telemetry.read, "telemetry", traced=False, found="{}"),
    call_of(jlp.telemetry.findings, "telemetry", traced=False, run="None"),
    call_of(jlp.debug.compare, "debug", traced=False, found="None", reference="None"),
)
