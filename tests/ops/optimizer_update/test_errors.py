"""Operands that an update does not take: who, what was given, what is needed."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlowprec.ops.optimizer_states import Coded
from jaxlowprec.ops.optimizer_update import optimizer_update
from tests.ops.optimizer_update.cases import SCALARS, WORDS, operands

CODES = ("nearest", "stochastic")


def call(at=None, value=None, codes=CODES, bits=32, **options):
    """The call of good operands, one of which is another."""
    args = list(operands((4, 40), CODES, jnp.bfloat16, 32))
    if at is not None:
        args[at] = value
    return optimizer_update(*args, codes=codes, bits=bits, **options)


ZEROS, BYTES = np.zeros((4, 40), np.float32), np.zeros((4, 40), np.uint8)
SHORT = Coded(BYTES, BYTES[:, :1])


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (TypeError, "g has dtype float16; needs float32 or bfloat16", {"at": 0, "value": ZEROS.astype(np.float16)}),
        (ValueError, r"g has shape \(4, 8\) and p \(4, 40\); needs the same", {"at": 0, "value": ZEROS[:, :8]}),
        (ValueError, "bits=32 of a float32 parameter; needs bits=None", {"at": 1, "value": ZEROS}),
        (ValueError, r"rest=None; needs int16\[4, 40\]", {"at": 2}),
        (TypeError, "rest has dtype int8; needs int16", {"at": 2, "value": BYTES.astype(np.int8)}),
        (ValueError, "rest=.*; needs None with these codes and bits", {"bits": 16}),
        (TypeError, "mu is .*; needs Coded.*as codes='nearest' says", {"at": 3, "value": ZEROS}),
        (TypeError, "mu is Coded; needs a float32 array, as codes=None says", {"codes": (None, "stochastic")}),
        (
            ValueError,
            r"nu.exponents has shape \(4, 1\); needs \(4, 2\)",
            {"at": 4, "value": SHORT},
        ),
        (ValueError, r"scalars has shape \(8,\); needs \(9,\)", {"at": 5, "value": SCALARS[:8]}),
        (ValueError, r"words=None; needs uint32\[2, 2\]", {"at": 6}),
        (ValueError, r"words has shape \(2,\); needs \(2, 2\)", {"at": 6, "value": WORDS[0]}),
        (TypeError, r"codes='nearest'; needs the roundings of mu and nu", {"codes": "nearest"}),
        (ValueError, "codes='down'", {"codes": ("down", None)}),
        (ValueError, "bits=8", {"bits": 8}),
        (ValueError, "rule='sgd'", {"rule": "sgd"}),
        (ValueError, "nu=.*; Lion has one moment: needs nu=None, codes=", {"rule": "lion"}),
        (ValueError, "Lion has one moment", {"rule": "lion", "at": 4}),
        (ValueError, "result='new'", {"result": "new"}),
        (ValueError, "implementation='gpu'", {"implementation": "gpu"}),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(error, message, options):
    with pytest.raises(error, match=message):
        call(**options)


def test_scalars_are_those_of_the_rule():
    args = list(operands((4, 40), (None, None), np.float32, None, rule="lion"))
    args[5] = SCALARS
    with pytest.raises(ValueError, match=r"scalars has shape \(9,\); needs \(6,\)"):
        optimizer_update(*args, rule="lion", codes=(None, None))


def test_words_without_draws_are_named():
    args = operands((4, 40), (None, None), np.float32, None)
    with pytest.raises(ValueError, match="words=.*; needs None"):
        optimizer_update(*args[:6], WORDS, codes=(None, None))
