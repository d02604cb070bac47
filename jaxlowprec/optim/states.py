"""`quantized_state`: any optax transformation, its state kept in 8 bits between steps (numerics.md 19)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlowprec.arguments import whole_number
from jaxlowprec.optim import wrapping
from jaxlowprec.optim.codes import BLOCK, POISON, Coded, RelativeCode
from jaxlowprec.optim.draws import STREAM_OF_STATES, words_of, words_of_leaves
from jaxlowprec.optim.leafwise import HeldMoment, Leafwise, leafwise, no_signs, signs_of
from jaxlowprec.optim.rules import Choice, Rules, check_rules, choose

_WHO = "quantized_state"


class QuantizedState(NamedTuple):
    """The state of `quantized_state`: two trees as the inner state is one, so what places or saves it does so here.

    Attributes:
        codes: the inner state; in place of what is quantised, codes of the same shape, uint8 or int8.
        exponents: uint8 [..., ceil(C / 32)] for each leaf [..., C] that is quantised; None for the others.
        words: uint32 [2], of the key.
        step: uint32 [], updates so far.
        version: int32 [], of these bytes.
    """

    codes: Any
    exponents: Any
    words: jax.Array
    step: jax.Array
    version: jax.Array


def quantized_state(inner: Any, rules: Rules = None, *, key: Any = 0, smallest: int = 4096) -> Any:
    """`inner`, whose state is kept in 8 bits between steps: decoded, updated, and encoded again.

    A matrix's first and second moment take 1.03 bytes per element each. Codes have the shape of their parameter, so its
    sharding applies to them. The bytes of codes depend on the numbers, the key, the step and the element's place in the
    whole array, not on the mesh. NaN and infinity make their block of 32 NaN.

    Arguments:
        inner: an `optax.GradientTransformation`: `optax.adamw`, `lion`, `sgd` with momentum, `contrib.muon`, chains
            and masks of them. `jlp.optim.adamw` and `lion` are updated in one pass, without float32 arrays between.
        rules: codes by the names of a state's fields, such as `{"nu_max": jlp.optim.UNSIGNED}`, beside those that
            optax's own states have by default; a name may begin with that of its class, `"ScaleByAdamState.nu"`. None
            as a code keeps the field as it is. Or a function of a leaf's path, "0/mu/layer/kernel", and the leaf, that
            returns a code or None; then nothing is kept for its size.
        key: an int or a JAX key, for stochastic rounding.
        smallest: vectors, and leaves of fewer elements in the whole array, keep their dtype.

    Returns:
        An `optax.GradientTransformationExtraArgs`, whose state is a `QuantizedState`. With `master_weights` it is the
        inner one of the two.

    Raises:
        TypeError: an argument is none of these, or a function of rules gave a code to a leaf that can have none.
        ValueError: a rule names no field of floats; the state was made by other arguments or another version; or
            within `jax.shard_map` a leaf is a shard, whose places in the whole array are not known. In a jitted update
            the version is only known when the program runs: then a state of another one becomes NaN.

    Source: numerics.md 19; Dettmers et al., arXiv 2110.02861, for states in 8 bits by blocks.

    >>> import jax.numpy as jnp, optax, jaxlowprec as jlp
    >>> params = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
    >>> tx = jlp.optim.quantized_state(optax.adam(1e-3))
    >>> state = tx.init(params)
    >>> state.codes[0].nu["w"].dtype.name, state.exponents[0].nu["w"].shape, state.codes[0].nu["b"].dtype.name
    ('uint8', (64, 2), 'float32')
    >>> updates, state = tx.update(params, state, params)
    """
    inner = wrapping.with_extra_arguments(_WHO, inner)
    check_rules(rules)
    smallest = whole_number(_WHO, "smallest", smallest, 0)
    words = words_of(_WHO, key)

    def init(params: Any) -> Any:
        state = inner.init(params)
        notes = lambda: _notes(choose(state, params, rules, smallest), signs_of(inner, state))  # noqa: E731
        return wrapping.explained(begun(state, params), notes, lambda: conversion(wrapping.shapes_of(params)))

    def begun(state: Any, params: Any) -> QuantizedState:
        """The state of step 0, to nearest: XLA would compute the draws of constants while it compiles."""
        coded = _encode(state, choose(state, params, rules, smallest))
        return QuantizedState(*coded, jnp.array(words), jnp.zeros((), jnp.uint32), wrapping.version())

    def conversion(like: Any) -> wrapping.Conversion:
        return wrapping.Conversion(
            opened=lambda state, params: (held(state, like, False)[0], params),
            closed=lambda state, params: (begun(state, like), params),
        )

    def held(state: Any, params: Any, in_codes: bool) -> tuple[Any, Any, Sequence[Choice], Sequence[Any]]:
        """The inner state; whether it is readable; the choices; and the words of the next step.

        Arguments:
            in_codes: leaves that the inner transformation takes in codes are not decoded.
        """
        readable = wrapping.is_readable(_WHO, state, QuantizedState)
        like = jax.eval_shape(inner.init, params)
        choices = choose(like, params, rules, smallest)
        words = words_of_leaves(state.words, state.step + 1, [c.place for c in choices], STREAM_OF_STATES)
        drawn = [words[i] if _draws(c) else None for i, c in enumerate(choices)]
        before = _stored(state, like, choices)
        for i, (choice, sign) in enumerate(zip(choices, signs_of(inner, like), strict=True)):
            if in_codes and (rounding := _stays(sign, choice)):
                before[i] = HeldMoment(before[i], rounding, drawn[i])
            elif choice.code is not None:
                exponents = jnp.where(readable, before[i].exponents, jnp.uint8(POISON))
                before[i] = choice.code.decode(Coded(before[i].codes, exponents), jax.tree.leaves(like)[i].dtype)
        return jax.tree.unflatten(jax.tree.structure(like), before), readable, choices, drawn

    def run(state: Any, params: Any, in_codes: bool, call: Callable[[Any, Any], tuple[Any, Any]]) -> tuple[Any, Any]:
        """The updates of the inner transformation, a function of its state and of whether that is readable."""
        before, readable, choices, drawn = held(state, params, in_codes)
        updates, after = call(before, readable)
        return updates, QuantizedState(*_encode(after, choices, drawn), state.words, state.step + 1, state.version)

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        given = gradients if params is None else params
        return run(state, given, False, lambda before, _: inner.update(gradients, before, params, **extra))

    def one_pass(gradients: Any, state: Any, params: Any, result: str, readable: Any) -> tuple[Any, Any]:
        def call(before: Any, known: Any) -> tuple[Any, Any]:
            return inner.update.one_pass(gradients, before, params, result, readable & known)

        return run(state, gradients if params is None else params, True, call)

    return wrapping.transformation(init, Leafwise(one_pass, no_signs) if leafwise(inner) else update)


def _draws(choice: Choice) -> bool:
    return choice.code is not None and choice.code.rounding == "stochastic"


def _encode(state: Any, choices: Sequence[Choice], words: Sequence[Any] | None = None) -> tuple[Any, Any]:
    """The trees of codes and of exponents."""
    leaves: list[Any]
    tree: Any
    leaves, tree = jax.tree.flatten(state)
    if len(leaves) != len(choices):
        raise ValueError(
            f"{_WHO}: the inner transformation's state has {len(leaves)} leaves after its update and {len(choices)} "
            "after init; needs one whose state keeps its structure"
        )
    coded: list[Any] = []
    for x, choice, drawn in zip(leaves, choices, words or [None] * len(leaves), strict=True):
        if isinstance(x, HeldMoment):
            coded.append(x.coded)
        else:
            coded.append(Coded(x, None) if choice.code is None else choice.code.encode(x, drawn))
    return tree.unflatten([q.codes for q in coded]), tree.unflatten([q.exponents for q in coded])


def _stored(state: QuantizedState, like: Any, choices: Sequence[Choice]) -> list[Any]:
    """The leaves of the inner state, of the shapes that `like` has: `Coded`, or arrays where there is no code."""
    leaves: list[Any]
    tree: Any
    leaves, tree = jax.tree.flatten(like)
    codes, exponents = (wrapping.leaves_of(_WHO, tree, part) for part in (state.codes, state.exponents))
    stored: list[Any] = []
    for leaf, choice, code, exponent in zip(leaves, choices, codes, exponents, strict=True):
        dtype, blocks = leaf.dtype, None
        if choice.code is not None:
            dtype, blocks = choice.code.dtype, (*leaf.shape[:-1], -(-leaf.shape[-1] // BLOCK))
        wrapping.check_leaf(_WHO, wrapping.within("codes", choice.path), code, leaf.shape, dtype)
        wrapping.check_leaf(_WHO, wrapping.within("exponents", choice.path), exponent, blocks, jnp.uint8)
        stored.append(code if choice.code is None else Coded(code, exponent))
    return stored


def _stays(sign: str, choice: Choice) -> Any:
    """The rounding of a leaf of that sign that stays in its code while it is updated; None if it does not stay."""
    code = choice.code
    if isinstance(code, RelativeCode) and sign == ("signed" if code.signed else "unsigned"):
        return code.rounding
    return None


def _notes(choices: Sequence[Choice], signs: Sequence[str]) -> Iterator[tuple[str, wrapping.Note]]:
    for choice, sign in zip(choices, signs, strict=True):
        one_pass = sign != "" if choice.code is None else _stays(sign, choice) is not None
        code = "" if choice.code is None else str(choice.code)
        yield wrapping.within("codes", choice.path), wrapping.Note(code, choice.note, one_pass)
        if choice.code is not None:
            yield wrapping.within("exponents", choice.path), wrapping.Note("exponents", "", one_pass)
