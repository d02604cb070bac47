"""The types of results: mypy reads this file in `make lint`, and here the calls return what they are declared to."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, assert_type, get_overloads

import jax
import jax.numpy as jnp
import pytest

import jaxlowprec as jlp

RECIPE = jlp.DelayedScaling()
OF_THE_CALLER = {"quantize_params"}  # returns the caller's own tree of parameters, of whatever type that is


def signatures() -> Iterator[tuple[Any, Any]]:
    """Each public function with itself and with each of its overloads."""
    for module in (jlp, jlp.ops):
        for name in module.__all__:
            function: Callable[..., Any] = inspect.unwrap(getattr(module, name))
            if inspect.isfunction(function):
                yield from ((function, signature) for signature in (function, *get_overloads(function)))


def arguments(signature: Callable[..., Any]) -> set[str]:
    """The names of the arguments, those of a TypedDict of options included."""
    names = set(inspect.signature(signature).parameters)
    options = str(signature.__annotations__.get("options", ""))
    if options.startswith("Unpack["):
        names |= set(signature.__globals__[options[len("Unpack[") : -1]].__annotations__)
        names.remove("options")
    return names


def test_public_functions_say_what_they_return():
    results = {(f.__name__, str(signature.__annotations__.get("return", "Any"))) for f, signature in signatures()}
    assert {name for name, result in results if result == "Any"} == OF_THE_CALLER


def test_overloads_take_every_argument():
    overloaded = [(f, signature) for f, signature in signatures() if f is not signature]
    assert {f.__name__ for f, _ in overloaded} >= {"linear", "dot_general", "einsum", "mlp", "rms_norm"}
    for function, signature in overloaded:
        assert arguments(signature) == arguments(function), function.__name__


def test_a_state_changes_the_result() -> None:
    x, w = jnp.ones((16, 32)), jnp.ones((32, 16))
    state = jlp.delayed_scaling.init_state(RECIPE)
    dims = (((1,), (0,)), ((), ()))
    y = assert_type(jlp.linear(x, w, name="up"), jax.Array)
    pairs = (
        assert_type(jlp.linear(x, w, None, RECIPE, state=state), tuple[jax.Array, dict[str, Any]]),
        assert_type(jlp.dot_general(x, w, dims, recipe=RECIPE, state=state), tuple[jax.Array, dict[str, Any]]),
        assert_type(jlp.einsum("tk,kn->tn", x, w, recipe=RECIPE, state=state), tuple[jax.Array, dict[str, Any]]),
    )
    assert y.shape == (16, 16)
    assert assert_type(jlp.dot_general(x, w, dims, None, jnp.float32), jax.Array).shape == y.shape
    assert assert_type(jlp.einsum("tk,kn->tn", x, w, key=None), jax.Array).shape == y.shape
    assert all(z.shape == y.shape and set(handed_on) == set(state) for z, handed_on in pairs)


def test_groups_have_states_too() -> None:
    x, kernels, sizes = jnp.ones((16, 32)), jnp.ones((2, 32, 16)), jnp.array([7, 9])
    state = jlp.delayed_scaling.init_state(RECIPE, num_experts=2)
    y = assert_type(jlp.grouped_matmul(x, kernels, sizes), jax.Array)
    z, handed_on = assert_type(
        jlp.grouped_matmul(x, kernels, sizes, None, RECIPE, state=state), tuple[jax.Array, dict[str, Any]]
    )
    assert y.shape == z.shape == (16, 16) and set(handed_on) == set(state)


def test_states_change_the_result_of_several_layers() -> None:
    x, w = jnp.ones((16, 32)), jnp.ones((32, 32))
    states = [jlp.delayed_scaling.init_state(RECIPE) for _ in range(2)]
    query, key = assert_type(jlp.linears(x, [w, w], names=["query", "key"]), tuple[jax.Array, ...])
    ys, of_linears = assert_type(
        jlp.linears(x, [w, w], recipe=RECIPE, states=states),
        tuple[tuple[jax.Array, ...], tuple[dict[str, Any] | None, ...]],
    )
    y = assert_type(jlp.mlp(x, [w, w], activation="gelu", saved="recompute"), jax.Array)
    z, of_mlp = assert_type(
        jlp.mlp(x, [w, w], recipe=RECIPE, activation="gelu", states=states),
        tuple[jax.Array, tuple[dict[str, Any] | None, ...]],
    )
    assert {a.shape for a in (query, key, *ys, y, z)} == {x.shape} and len(of_linears) == len(of_mlp) == 2


@pytest.mark.parametrize("norm", [jlp.rms_norm, jlp.layer_norm])
def test_a_residual_changes_the_result_of_a_norm(norm: Callable[..., Any]) -> None:
    x, gamma = jnp.ones((4, 8)), jnp.ones(8)
    assert isinstance(norm(x, gamma), jax.Array) and len(norm(x, gamma, residual=x)) == 2
    assert_type(jlp.rms_norm(x, gamma, epsilon=1e-5), jax.Array)
    assert_type(jlp.rms_norm(x, gamma, x), tuple[jax.Array, jax.Array])
    assert_type(jlp.layer_norm(x, gamma, gamma), jax.Array)
    assert_type(jlp.layer_norm(x, gamma, None, x), tuple[jax.Array, jax.Array])
    assert_type(jlp.layer_norm(x, gamma, residual=x), tuple[jax.Array, jax.Array])


def test_the_pre_activation_is_returned_beside_the_product() -> None:
    a = jlp.quantize(jnp.ones((16, 32)), jlp.MXFP8())
    y, before = assert_type(
        jlp.scaled_matmul(a, a, activation="gelu", return_pre_activation=True), tuple[jax.Array, jax.Array]
    )
    assert assert_type(jlp.scaled_matmul(a, a), jax.Array).shape == y.shape == before.shape
