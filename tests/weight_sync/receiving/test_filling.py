"""A model made of the weights that came over."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlowprec.weight_sync import InProcess, Receiver, WeightSource, push, to_tree
from tests.eager import jlp
from tests.helpers import assert_same_bytes, random_array

FORMATS = {
    "int4": jlp.Int4(32),
    "int4 asymmetric": jlp.Int4(32, symmetric=False),
    "nvfp4": jlp.NVFP4((16, 16)),
    "mxfp8": jlp.MXFP8(),
    "fp8": jlp.Float8Block(block=(128, 128)),
}


def tree(fmt):
    return {
        "layers": [{"up": jlp.quantize(random_array((64, 32), seed=i), fmt, axis=-2)} for i in range(2)],
        "norm": random_array((32,), "float32"),
        "steps": jnp.arange(3),
    }


def received(source, **options):
    receiver = Receiver()
    push(source, InProcess(receiver, **options))
    return receiver.weights


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("abstract", [False, True])
def test_a_tree_comes_over_and_is_the_same(fmt, abstract):
    sent = tree(fmt)
    like = jax.eval_shape(lambda: sent) if abstract else tree(fmt)
    found = to_tree(received(WeightSource(sent)), like)
    assert jax.tree.structure(found) == jax.tree.structure(sent)
    assert_same_bytes(found, sent)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(found))


def test_a_module_is_made_without_its_parameters():
    def model(seed):
        linear = jlp.nnx.Linear(64, 32, rngs=nnx.Rngs(seed))
        return jlp.quantize_params(linear, jlp.Int4QAT(group_size=32))

    sent, made = model(0), nnx.eval_shape(lambda: model(1))
    nnx.update(made, to_tree(received(WeightSource(sent)), made))
    x = random_array((4, 64))
    assert_same_bytes(made(x), sent(x))


def test_a_model_keeps_its_version_while_others_come():
    def sent(version):
        return {"w": np.full((256, 256), version, np.float32)}  # larger than what memory is kept for

    receiver = Receiver()
    transport = InProcess(receiver)
    push(WeightSource(sent(1)), transport)
    first = to_tree(receiver.weights, sent(0))
    for version in range(2, 6):
        push(WeightSource(sent(version)), transport)
        assert_same_bytes(first, sent(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("norm"), r"to_tree: did not get norm; needs"),
        (lambda w: w.pop("layers.1.up.scale"), r"did not get layers.1.up.scale"),
        (lambda w: w.update(more=w["norm"]), r"to_tree: got more, for which `like` has no place"),
        (
            lambda w: w.update(norm=w["norm"].astype(np.float16)),
            r"norm came as float16 \(32,\), and `like` has float32",
        ),
        (lambda w: w.update({"layers.0.up.data": w["layers.0.up.data"][:8]}), r"layers.0.up.data came as uint8 \(8, "),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    weights = dict(received(WeightSource(tree(FORMATS["int4"]))))
    change(weights)
    with pytest.raises(ValueError, match=message):
        to_tree(weights, tree(FORMATS["int4"]))
