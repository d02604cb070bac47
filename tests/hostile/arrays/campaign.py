"""Arrays of hostile numbers through every op, natively and by reference, compared byte for byte.

    python -m tests.hostile.arrays --cases 1000000 --minutes 480 --isa all

A case is an array. Cases come by variants, an op with its options, shape and dtype that is compiled once, and batches
of arrays for each: all follow from the seed. Each instruction set has a process of its own. It prints how many cases
were reached; of a difference it prints where it is and the command that finds it again, and fails.
"""

import argparse
import dataclasses
import functools
import os
import subprocess
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec.wiring import native
from tests.helpers import as_bytes
from tests.hostile.arrays.variants import variant

ARRAYS = 32
"""Of a batch: compared by one call."""
BATCHES = 64
"""Of a variant: enough that compiling is not most of the work."""
FORGET = 25
"""Variants after which what was compiled is let go of."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where a native result is not the reference's.

    Attributes:
        seed, variant, batch, array: which case.
        text: the variant's.
        places: for each result that differs, where it first does and what is there.
    """

    seed: int
    variant: int
    batch: int
    array: int
    text: str
    places: tuple[str, ...]

    def __str__(self):
        command = f"python -m tests.hostile.arrays --seed {self.seed} --variant {self.variant} --isa {native.isa()}"
        return "\n  ".join(
            [
                f"{native.isa()}: array {self.array} of batch {self.batch} of variant {self.variant}: {self.text}",
                *self.places,
                f"again: {command}",
            ]
        )


def bits_of(x):
    """A traced array's bits."""
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return x if x.dtype == unsigned else jax.lax.bitcast_convert_type(x, unsigned)


def same(native_result, expected, any_nan):
    """Which of the arrays along the leading axis are the same."""
    assert (native_result.shape, native_result.dtype) == (expected.shape, expected.dtype)
    equal = bits_of(native_result) == bits_of(expected)
    if any_nan and jnp.issubdtype(expected.dtype, jnp.floating):
        equal |= jnp.isnan(native_result.astype(jnp.float32)) & jnp.isnan(expected.astype(jnp.float32))
    return equal.reshape(equal.shape[0], -1).all(axis=1) if equal.size else jnp.ones(equal.shape[0], bool)


@functools.partial(jax.jit, static_argnums=0)
def compare(one, *operands):
    """Results natively and by reference, and which arrays' are the same in each."""
    both = [one.call(implementation, *operands) for implementation in ("ffi", "reference")]
    return both, [same(a, b, one.any_nan) for a, b in zip(*both, strict=True)]


def places(both, array):
    """Where the results of an array first differ."""
    found = []
    for i, (ours, theirs) in enumerate(zip(*both, strict=True)):
        ours, theirs = (as_bytes(r)[array] for r in (ours, theirs))
        differ = np.argwhere(ours != theirs)
        if len(differ):
            where = tuple(int(n) for n in differ[0])
            values = f"native {ours[where]:#x}, reference {theirs[where]:#x}"
            found.append(f"result {i} differs in {len(differ)} of {ours.size} elements, at {list(where)}: {values}")
    return tuple(found)


def run_variant(seed, number, batches=BATCHES, deadline=float("inf"), count=ARRAYS):
    """How many arrays of a variant were compared, and the first difference or None."""
    one = variant(seed, number)
    for batch in range(batches):
        if time.monotonic() > deadline:
            return batch * count, None
        operands = one.operands(np.random.default_rng([seed, number, batch]), count)
        both, equal = compare(one, *operands)
        wrong = np.argwhere(~np.all(np.asarray(equal), axis=0)).ravel()
        if len(wrong):
            array = int(wrong[0])
            return batch * count + array + 1, Difference(seed, number, batch, array, one.text, places(both, array))
    return batches * count, None


def run(seed, cases, minutes, first=0, batches=BATCHES, report=print):
    """The cases reached and the first difference or None; stops in time, or after that many cases."""
    start, reached, number = time.monotonic(), 0, first
    deadline = start + 60 * minutes
    while reached < cases and time.monotonic() < deadline:
        counted, difference = run_variant(seed, number, min(batches, -(-(cases - reached) // ARRAYS)), deadline)
        reached, number = reached + counted, number + 1
        if difference:
            return reached, number - first, difference
        if (number - first) % FORGET == 0:
            jax.clear_caches()
            report(f"{native.isa()}: {reached:,} cases of {number - first} variants, {time.monotonic() - start:,.0f} s")
    return reached, number - first, None


def in_this_process(options):
    """One instruction set: the exit status."""
    if native.isa() != options.isa:
        print(f"JAXLOWPREC_ISA={options.isa}, but {native.isa()} is in use; needs one of {native.available_isas()}")
        return 2
    if options.variant is not None:
        reached, difference = run_variant(options.seed, options.variant)
        variants = 1
    else:
        flush = functools.partial(print, flush=True)
        reached, variants, difference = run(options.seed, options.cases, options.minutes, report=flush)
    if difference:
        print(difference)
    found = "1 difference" if difference else "no difference"
    print(f"{options.isa}: {reached:,} cases of {variants} variants of seed {options.seed}, {found}", flush=True)
    return int(difference is not None)


def main(arguments=None):
    """Parses the command line and runs each instruction set in a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.arrays", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=100_000, help="of each instruction set")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--isa", default="all", help="all, or one of those available here")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all instruction sets together")
    parser.add_argument("--variant", type=int, help="this one alone")
    options = parser.parse_args(arguments)
    available = native.available_isas()
    if options.isa != "all" and options.isa not in available:
        parser.error(f"--isa {options.isa}; needs all or one of {', '.join(available)}")
    if options.isa == os.environ.get("JAXLOWPREC_ISA"):
        return in_this_process(options)
    isas = available if options.isa == "all" else (options.isa,)
    given = [("cases", options.cases), ("seed", options.seed), ("minutes", options.minutes / len(isas))]
    given += [] if options.variant is None else [("variant", options.variant)]
    status = 0
    for isa in isas:
        command = [sys.executable, "-m", "tests.hostile.arrays", "--isa", isa]
        command += [word for name, value in given for word in (f"--{name}", str(value))]
        status = max(status, subprocess.run(command, env=os.environ | {"JAXLOWPREC_ISA": isa}, check=False).returncode)
    return status
