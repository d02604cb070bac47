"""Sharded states have the bytes of whole ones, and the shardings of their parameters."""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from tests.docs.pages import pieces, printed_by
from tests.helpers import assert_same_bytes
from tests.sharding.meshes import by_axis_type, mesh_of, name_of, place

SHAPES = {"w": (64, 512), "straddles": (48, 96), "stack": (2, 32, 64), "b": (64,)}
MESHES = [((8, 1), P("a", None)), ((2, 4), P("a", "b")), ((1, 8), P(None, "b"))]
every_mesh = pytest.mark.parametrize(("sizes", "spec"), MESHES, ids=name_of)


def params():
    made = {n: jax.random.normal(jax.random.key(i), s) * 0.02 for i, (n, s) in enumerate(SHAPES.items())}
    return {name: np.asarray(x, jnp.bfloat16 if x.ndim > 1 else jnp.float32) for name, x in made.items()}


def gradients(i):
    return {n: np.asarray(jax.random.normal(jax.random.key(10 + i), s) * 1e-3) for n, s in SHAPES.items()}


def placed(tree, mesh, spec):
    """Matrices split along their last axes."""
    whole = lambda x: P() if x.ndim < 2 else P(*[None] * (x.ndim - 2), *spec)  # noqa: E731
    return jax.tree.map(lambda x: place(x, mesh, whole(x)), tree)


def step_of(tx):
    return lambda gradients, state, params: jlp.optim.apply_gradients(tx, gradients, state, params)


class Largest(NamedTuple):
    nu: Any


def exact():
    """An update that rounds alike in every program: its products are exact.

    XLA contracts those of Adam with a sum in one program and not in another.
    """

    def update(gradients, state, params=None):
        return gradients, Largest(jax.tree.map(lambda nu, g: jnp.maximum(nu / 2, jnp.abs(g)), state.nu, gradients))

    largest = optax.GradientTransformation(lambda params: Largest(jax.tree.map(jnp.zeros_like, params)), update)
    return optax.chain(largest, optax.trace(0.5), optax.scale(-0.5))


def elementwise(bits):
    """Both wrappers around it."""
    inner = jlp.optim.quantized_state(exact(), {"nu": jlp.optim.UNSIGNED}, smallest=2048)
    return jlp.optim.master_weights(inner, bits=bits)


def one_pass(bits):
    adamw = jlp.optim.adamw(optax.linear_schedule(1e-2, 1e-3, 10), weight_decay=0.1)
    return jlp.optim.master_weights(jlp.optim.quantized_state(adamw, smallest=2048), bits=bits)


def run(tx, mesh=None, spec=None, steps=3):
    if mesh is None:
        p, give = params(), gradients
    else:
        p, give = placed(params(), mesh, spec), lambda i: placed(gradients(i), mesh, spec)
    state, step = jax.jit(tx.init)(p), jax.jit(step_of(tx))
    for i in range(steps):
        p, state = step(give(i), state, p)
    return p, state


@pytest.fixture(
    scope="module",
    params=itertools.product([elementwise, one_pass], [32, 16]),
    ids=lambda given: f"{given[0].__name__}-{given[1]}",
)
def expected(request):
    make, bits = request.param
    tx = make(bits)
    return tx, run(tx)


@every_mesh
@by_axis_type
def test_bytes_do_not_depend_on_the_mesh(expected, sizes, spec, axis_type):
    tx, whole = expected
    mesh = mesh_of(sizes, axis_type)
    with jax.set_mesh(mesh):
        assert_same_bytes(jax.device_get(run(tx, mesh, spec)), jax.device_get(whole))


@by_axis_type
@pytest.mark.parametrize("make", [elementwise, one_pass])
def test_codes_and_exponents_are_split_as_parameters(make, axis_type):
    mesh, spec = mesh_of((2, 4), axis_type), P("a", "b")
    with jax.set_mesh(mesh):
        p, state = run(make(32), mesh, spec)
    held = NamedSharding(mesh, spec)
    for x in (p["w"], state.remainders["w"], state.inner.codes[0].nu["w"], state.inner.exponents[0].nu["w"]):
        assert x.sharding.is_equivalent_to(held, 2), x.sharding
    for x in (p["straddles"], state.remainders["straddles"], state.inner.codes[0].nu["straddles"]):
        whole_rows = make is one_pass and axis_type == AxisType.Auto  # what splits blocks is gathered
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, P("a")) if whole_rows else held, 2), x.sharding


def test_muon_on_explicit_axes():
    page, names = "docs/how-to/optimizer.md", {"jax": jax, "jlp": jlp, "optax": optax}
    [piece] = [piece for piece in pieces(page) if "def partitioned" in piece.code]
    printed_by(piece, page, names)

    def run_of(inner, *where):
        return run(jlp.optim.master_weights(jlp.optim.quantized_state(inner, smallest=2048), bits=32), *where, steps=1)

    muon = optax.contrib.muon(1e-2)
    mesh, spec = mesh_of((2, 4), AxisType.Explicit), P("a", "b")
    whole, whole_state = run_of(muon)
    with jax.set_mesh(mesh):
        p, state = run_of(names["partitioned"](muon), mesh, spec)
    assert p["w"].sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
    momentum = lambda s: s.inner.codes.inner_states["muon"].inner_state[0].mu["w"]  # noqa: E731
    assert_same_bytes(jax.device_get(momentum(state)), jax.device_get(momentum(whole_state)))
    np.testing.assert_allclose(p["w"].astype(np.float32), whole["w"].astype(np.float32), rtol=0.05, atol=1e-4)


def test_a_run_resumes_on_another_mesh(expected):
    tx, (p, state) = expected
    mesh = mesh_of((4, 2))
    step = jax.jit(step_of(tx))
    whole = step(gradients(9), state, p)
    by = lambda tree: jax.tree.map(  # noqa: E731
        lambda x: place(
            np.asarray(x), mesh, P(*[None] * (x.ndim - 1), "b") if x.ndim and x.shape[-1] % 2 == 0 else P()
        ),
        tree,
    )
    assert_same_bytes(jax.device_get(step(by(gradients(9)), by(state), by(p))), jax.device_get(whole))


def test_smallest_is_of_the_whole_array():
    """A device has 1024 elements of it."""
    mesh = mesh_of((8,))
    p = {"w": place(np.ones((64, 128), np.float32), mesh, P("a"))}
    assert jax.jit(jlp.optim.quantized_state(optax.adam(1e-3)).init)(p).codes[0].nu["w"].dtype == jnp.uint8


def test_shards_within_shard_map_are_refused():
    mesh = mesh_of((8,))
    tx = jlp.optim.quantized_state(optax.sgd(0.1, 0.9), smallest=0)
    p = np.ones((64, 128), np.float32)

    def step(g):
        return tx.update(g, tx.init(g), g)[0]

    with pytest.raises(ValueError, match=r"differs along the mesh axes \['a'\].*update outside of jax.shard_map"):
        jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("a"), out_specs=P("a")))(p)
    with jax.set_mesh(mesh_of((8,), AxisType.Explicit)):
        assert tx.init(p).codes[0].trace.shape == p.shape
