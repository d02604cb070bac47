"""Steps of `jlp.optim.adamw` and `lion` on one array (numerics.md 19): the scalars of a step, and their update."""

import numpy as np

from tests.numpy_oracle import optimizer_states as oracle


def scalars(count, rate, b1=0.9, b2=0.999, eps=1e-8, weight_decay=1e-4):
    """float32 [9] of the step of that count, from 1."""
    corrections = [np.float32(1) - power(np.float32(b), count) for b in (b1, b2)]
    return np.array([b1, 1 - b1, b2, 1 - b2, *corrections, eps, weight_decay, -np.float32(rate)], np.float32)


def lion_scalars(count, rate, b1=0.9, b2=0.99, weight_decay=1e-3):
    """float32 [6], the same for each count."""
    return np.array([b1, 1 - b1, b2, 1 - b2, weight_decay, -np.float32(rate)], np.float32)


def power(base, count):
    """base^count by squares of float32."""
    result, factor = np.float32(1), np.float32(base)
    while count:
        if count % 2:
            result = result * factor
        count, factor = count // 2, factor * factor
    return result


def steps(gradients, p, rate, *, bits=None, coded=True, key=(0, 0), path="w", is_update=False, rule="adamw", **options):
    """The parameter or update, remainder and moments after each step; a moment in 8 bits is codes and exponents.

    Arguments:
        gradients: those of each step.
        rate: the learning rate, or a function of the step, from 0.
        coded: whether moments are kept in 8 bits, rounded stochastically.
        path: of the parameter.
        options: those of the scalars.
    """
    rest = None if bits in (None, 16) else np.zeros(p.shape, np.int16 if bits == 32 else np.int8)
    zeros, rounding = np.zeros(p.shape, np.float32), "stochastic" if coded else None
    mu, nu = (oracle.encode_relative(zeros, signed) if coded else zeros for signed in (True, False))
    codes, of_step = (rounding, rounding), scalars
    if rule == "lion":
        nu, codes, of_step = None, (rounding, None), lion_scalars
    for i, g in enumerate(gradients):
        words = [oracle.leaf_words(key, i + 1, *place) for place in ((f"0/{path}", 15), (path, 16))]
        now = of_step(i + 1, rate(i) if callable(rate) else rate, **options)
        new, rest, mu, nu = oracle.optimizer_update(g, p, rest, mu, nu, now, words, codes, bits, is_update, rule)
        yield new, rest, mu, nu
        if not is_update:
            p = new
