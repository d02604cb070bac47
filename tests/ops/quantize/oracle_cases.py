"""Arrays with what the oracle makes of them, for tests of NVFP4's rules for scales: each is computed once."""

import functools
import itertools

from tests.helpers import FLOATS, random_array
from tests.ops.quantize.every_way import assert_all_match, by_implementation, by_oracle
from tests.ops.quantize.hostile_arrays import spread


@functools.cache
def arrays_and_oracle(fmt, turn, shapes, ways):
    dtypes = itertools.cycle(FLOATS[turn:] + FLOATS[:turn])
    arrays = [random_array(s, d, seed=sum(s)) for s, d in zip(shapes, dtypes, strict=False)]
    return arrays, by_oracle(arrays, fmt, ways)


@functools.cache
def ordinary_and_extreme(fmt, exponent, dtype, ways):
    arrays = [spread((48, 80), exponent, s, dtype) for s in (0, 3, 14)]
    return arrays, by_oracle(arrays, fmt, ways)


@functools.cache
def with_amax(fmt, amax, ways):
    x = random_array((33, 50), "bfloat16")
    return x, by_oracle([x], fmt, ways, amax=amax)


class OracleCases:
    """For classes of cases that every implementation passes."""

    implementation: str
    DTYPES = ("bfloat16", "float32")

    def assert_gives_the_oracles(self, arrays, fmt, ways):
        assert_all_match(by_implementation(arrays, fmt, ways, self.implementation), by_oracle(arrays, fmt, ways))
