"""The function: what an optimizer's update takes, and clear errors for what it does not."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxlowprec.arguments import array, one_of, shown
from jaxlowprec.ops.checks import Implementation, check_implementation, check_whole
from jaxlowprec.ops.optimizer_states import BLOCK, REMAINDERS, Coded
from jaxlowprec.ops.optimizer_update.op import UpdateSpec, flat, update_op
from jaxlowprec.ops.optimizer_update.reference import SCALARS, Moment, Rule
from jaxlowprec.wiring.sharding_rule import resharded, sharding_of

_WHO = "optimizer_update"
_FLOATS = (jnp.dtype("bfloat16"), jnp.dtype("float32"))

StateRounding = Literal["nearest", "stochastic"] | None
"""How a moment is rounded to its codes; None: it is float32."""


class OptimizerUpdate(NamedTuple):
    """The results of `optimizer_update`.

    Attributes:
        parameter: the new parameter, in its dtype; or its update, float32.
        rest: the new remainder, or None.
        mu, nu: the new moments, as they were given; nu is None with Lion.
    """

    parameter: jax.Array
    rest: jax.Array | None
    mu: Moment
    nu: Moment | None


def optimizer_update(
    g: jax.Array,
    p: jax.Array,
    rest: jax.Array | None,
    mu: Moment,
    nu: Moment | None,
    scalars: jax.Array,
    words: jax.Array | None,
    *,
    rule: Rule = "adamw",
    codes: tuple[StateRounding, StateRounding],
    bits: int | None = None,
    result: Literal["parameter", "update"] = "parameter",
    implementation: Implementation = None,
) -> OptimizerUpdate:
    """One step of AdamW or Lion for one array: moments decoded, updated and encoded, the weight updated, in one pass.

    Its bytes depend on its arguments and on nothing else: not on the platform, the mesh or the threads. Where the old
    parameter, remainder and moments are donated, the new ones take their place.

    Arguments:
        g: the gradient [..., C], float32 or bfloat16.
        p: the parameter [..., C], float32 or bfloat16.
        rest: its remainder [..., C]: int16 with 32 bits, int8 with 24, else None.
        mu, nu: the first and the second moment: float32 [..., C], or `Coded`. Lion has no second one: nu is None.
        scalars: float32 [9]: b1, 1 - b1, b2, 1 - b2, the bias corrections of mu and nu, epsilon, the weight decay, and
            minus the learning rate. Lion's are [6], without corrections and epsilon.
        words: uint32 [2, 2]: of the draws for both moments, and for p; None where nothing is rounded stochastically.
        rule: "adamw" or "lion".
        codes: how mu and nu are rounded to codes.
        bits: how a bfloat16 parameter keeps its weight: 32 or 24, with a remainder; 16, rounded stochastically; None,
            rounded to nearest. A float32 one has None.
        result: the new parameter; or the float32 numbers that are to be added to the old one.
        implementation: None, "ffi", "portable" or "reference": see `quantize`.

    Raises:
        TypeError: a dtype that does not fit.
        ValueError: a shape or an option that does not fit; or, within `jax.shard_map`, an array is a shard and
            something is drawn: its place in the whole array is not known.
        NotImplementedError: `implementation="ffi"` where there is no kernel.

    Source: numerics.md 19; Loshchilov and Hutter, arXiv 1711.05101; Chen et al., arXiv 2302.06675.
    """
    one_of(_WHO, "rule", rule, *SCALARS)
    one_of(_WHO, "bits", bits, None, 32, 24, 16)
    one_of(_WHO, "result", result, "parameter", "update")
    check_implementation(_WHO, implementation)
    if not isinstance(codes, tuple) or len(codes) != 2:
        raise TypeError(f"{_WHO}: codes={shown(codes)}; needs the roundings of mu and nu, such as ('nearest', None)")
    for rounding in codes:
        one_of(_WHO, "codes", rounding, None, "nearest", "stochastic")
    g, p = _floats("g", g), _floats("p", p)
    if g.shape != p.shape:
        raise ValueError(f"{_WHO}: g has shape {g.shape} and p {p.shape}; needs the same")
    if p.dtype == jnp.float32 and bits is not None:
        raise ValueError(f"{_WHO}: bits={bits} of a float32 parameter; needs bits=None, or a bfloat16 parameter")
    rest = _fits("rest", rest, p.shape if bits in REMAINDERS else None, REMAINDERS.get(bits or 0))
    mu = _moment("mu", mu, p.shape, codes[0])
    if rule != "lion":
        nu = _moment("nu", nu, p.shape, codes[1])
    elif nu is not None or codes[1] is not None:
        raise ValueError(
            f"{_WHO}: nu={shown(nu)} with codes={codes}; Lion has one moment: needs nu=None, codes=(..., None)"
        )
    scalars = _fits("scalars", scalars, (SCALARS[rule],), jnp.float32)
    draws = bits == 16 or "stochastic" in codes
    words = _fits("words", words, (2, 2) if draws else None, jnp.uint32)
    if draws:
        check_whole(_WHO, p)
    spec = UpdateSpec(
        rule,
        max(p.ndim, 2),
        tuple(rounding is not None for rounding in codes[: 1 if rule == "lion" else 2]),
        (codes[0] == "stochastic", codes[1] == "stochastic"),
        bits,
        result == "update",
        p.shape[-1:] == () or p.shape[-1] % BLOCK != 0,
    )
    operands = [x if p.ndim >= 2 else jnp.reshape(x, _matrix(x.shape)) for x in flat(g, p, rest, mu, nu)]
    first, last = operands[:2], operands[2:]
    places = _places(p.shape, words) if words is not None else ()
    made = iter(update_op(spec, implementation)(*first, scalars, *last, *places))

    def like(given: jax.Array) -> jax.Array:
        x = next(made)
        return resharded(x if x.ndim == given.ndim else jnp.reshape(x, given.shape), sharding_of(given))

    def moment(given: Moment) -> Moment:
        return Coded(like(given.codes), like(given.exponents)) if isinstance(given, Coded) else like(given)

    return OptimizerUpdate(
        like(p), None if rest is None else like(rest), moment(mu), None if nu is None else moment(nu)
    )


def _places(shape: tuple[int, ...], words: jax.Array) -> tuple[jax.Array, ...]:
    """The words, and the numbers of rows and of blocks, made beside the op so that they are split as arrays are."""
    rows = _matrix(shape)[:-1]
    count = jax.lax.iota(jnp.uint32, math.prod(rows)).reshape(rows)
    return words, count, jax.lax.iota(jnp.uint32, -(-_matrix(shape)[-1] // BLOCK))


def _matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*[1] * (2 - len(shape)), *shape)


def _floats(name: str, x: Any) -> jax.Array:
    x = array(_WHO, name, x)
    if x.dtype not in _FLOATS:
        raise TypeError(f"{_WHO}: {name} has dtype {x.dtype}; needs float32 or bfloat16")
    return x


def _fits(name: str, x: Any, shape: tuple[int, ...] | None, dtype: Any) -> Any:
    """An array of that shape and dtype; None where there is no shape."""
    if shape is None or x is None:
        if shape is not None or x is not None:
            needed = "None" if shape is None else f"{jnp.dtype(dtype)}{list(shape)}"
            raise ValueError(f"{_WHO}: {name}={shown(x)}; needs {needed} with these codes and bits")
        return None
    x = array(_WHO, name, x)
    if x.dtype != jnp.dtype(dtype):
        raise TypeError(f"{_WHO}: {name} has dtype {x.dtype}; needs {jnp.dtype(dtype)}")
    if x.shape != shape:
        raise ValueError(f"{_WHO}: {name} has shape {x.shape}; needs {shape}")
    return x


def _moment(name: str, x: Any, shape: tuple[int, ...], rounding: StateRounding) -> Moment:
    if (rounding is not None) != isinstance(x, Coded):
        needed = "a float32 array" if rounding is None else "Coded(codes, exponents)"
        raise TypeError(f"{_WHO}: {name} is {type(x).__name__}; needs {needed}, as codes={rounding!r} says")
    if not isinstance(x, Coded):
        return _fits(name, x, shape, jnp.float32)
    blocks = (*shape[:-1], -(-shape[-1] // BLOCK)) if shape else (1,)
    return Coded(
        _fits(f"{name}.codes", x.codes, shape, jnp.uint8), _fits(f"{name}.exponents", x.exponents, blocks, jnp.uint8)
    )
