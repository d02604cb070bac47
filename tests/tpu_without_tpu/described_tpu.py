"""XLA's own compiler for TPUs, on a machine that has none: libtpu takes a description of the TPU.

Programs are read in optimised HLO, where fusions are known. libtpu then makes vector instructions of each fusion, and
there it drops roundings (docs/spec/numerics.md 10); `Program.dropped_casts` finds the patterns in which it does.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from typing import Any
from unittest import mock

import jax
import pytest
from jax.experimental import topologies

TPUS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "7x": "tpu7x:2x2x1"}
"""The topologies of four chips that libtpu describes: a TPU v7 chip has two devices."""
RAGGED_CODES = {tpu: ("f8e4m3fn", "f8e4m3fn") if tpu == "7x" else ("f32", "f32") for tpu in TPUS}
"""The operands of libtpu's kernel for `jax.lax.ragged_dot` of E4M3 codes: before v7 it widens them itself, in fewer
estimated cycles than decoding to bfloat16 takes."""
WITHOUT_A_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",  # asks no metadata server of Google's cloud
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes of pytest's
}
ESTIMATES = ("reciprocal_estimate", "inverse_root_estimate")
"""Functions of `jaxlowprec.ops.exact` whose roundings are the platform's: what uses them corrects them by integers."""
REPEATING = "(repeated_on_tpu)"
"""In JAX's names: the function of `jaxlowprec.ops.scaled_matmul.portable` whose product with ones repeats scales."""

_COMPUTATION = re.compile(r"^(?:ENTRY )?%(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%(\S+) = (\(?\w+)(\[[\d,]*\])?.*? ([a-z][\w-]*)\(([^)]*)\)(.*)$")
_ROUNDED_BY_THE_PLATFORM = ("divide", "sqrt", "rsqrt", "cbrt", "exponential", "log", "power", "tanh", "logistic")
_NARROW = ("f8", "bf16", "f16")
_UNCHANGED = ("bitcast", "bitcast-convert", "copy", "reshape", "transpose", "broadcast", "slice", "select")
"""Instructions that hand on numbers of a fusion without an operation that needs them rounded."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of HLO. `dtype` begins with a parenthesis where the result is a tuple; `origin` is JAX's name for it."""

    name: str
    dtype: str
    shape: str
    kind: str
    operands: tuple[str, ...]
    origin: str


@dataclasses.dataclass(frozen=True, repr=False)
class Program:
    """What libtpu made of a function: for each computation of the optimised HLO, its instructions by name.

    `temporary_bytes` are those beside arguments and results.
    """

    text: str
    computations: dict[str, dict[str, Instruction]]
    temporary_bytes: int

    @staticmethod
    def of(made: Any) -> Program:
        """The program of a compiled function."""
        text = made.as_text()
        computations: dict[str, dict[str, Instruction]] = {}
        within: dict[str, Instruction] = {}
        for line in text.splitlines():
            if begins := _COMPUTATION.match(line):
                within = computations.setdefault(begins[1], {})
            elif found := _INSTRUCTION.match(line):
                name, dtype, shape, kind, operands, rest = found.groups()
                origin = re.search(r'op_name="([^"]*)"', rest)
                named = tuple(re.findall(r"%([\w.-]+)", operands))
                within[name] = Instruction(name, dtype, shape or "", kind, named, origin[1] if origin else "")
        return Program(text, computations, made.memory_analysis().temp_size_in_bytes)

    def of_kind(self, *kinds: str) -> list[Instruction]:
        """All instructions of these kinds, those within fusions among them."""
        return [i for within in self.computations.values() for i in within.values() if i.kind in kinds]

    @property
    def loops(self) -> list[Instruction]:
        return self.of_kind("while")

    @property
    def gathers(self) -> list[Instruction]:
        return self.of_kind("gather", "dynamic-gather")

    def products(self, origin: str = "") -> list[tuple[str, ...]]:
        """For each product on the matrix unit, the dtypes of its operands; of those that JAX names so.

        Products that repeat scales are left out. XLA calls them convolutions on TPUs; for `jax.lax.ragged_dot` libtpu
        has a kernel of its own.
        """
        return [
            tuple(within[operand].dtype for operand in factors)
            for within in self.computations.values()
            for i in within.values()
            if origin in i.origin and REPEATING not in i.origin and (factors := _factors(i))
        ]

    def roundings_of_the_platform(self, apart: tuple[str, ...] = ESTIMATES) -> list[Instruction]:
        """Divisions, roots and functions of floats whose last bit is the platform's choice.

        A division by a constant counts though XLA has made it a product. `apart`: functions of the program, by the name
        under which JAX traced them, whose roundings do not matter.
        """

        def leaves_rounding(i: Instruction) -> bool:
            is_float = i.dtype.startswith(("f", "bf"))
            was_division = i.kind == "multiply" and i.origin.endswith("/div")
            return is_float and (i.kind in _ROUNDED_BY_THE_PLATFORM or was_division)

        every = (i for within in self.computations.values() for i in within.values())
        return [i for i in every if leaves_rounding(i) and not any(f"({name})" in i.origin for name in apart)]

    @property
    def dropped_casts(self) -> list[Instruction]:
        """Casts to float32 of numbers that the same fusion rounded to 8 or 16 bits, which read them unrounded.

        libtpu drops both casts unless a barrier or an integer operation is between them. Casts whose results are only
        cast back change nothing.
        """
        return [
            i
            for within in self.computations.values()
            for i in within.values()
            if i.kind == "convert" and i.dtype == "f32"
            if (narrow := within[i.operands[0]].dtype).startswith(_NARROW)
            if _is_rounded_here(within, i.operands[0]) and not _only_cast_back(within, i.name, narrow)
        ]

    @property
    def faults(self) -> list[str]:
        """What no dense op may have on a TPU: each instruction, by the name that JAX gave it."""
        found = {
            "loop": self.loops,
            "gather": self.gathers,
            "dropped cast": self.dropped_casts,
            "rounded by the platform": self.roundings_of_the_platform(),
        }
        return [f"{what}: {i.kind} {i.dtype}{i.shape} {i.origin}" for what, every in found.items() for i in every]

    @property
    def cycles(self) -> int:
        """Of the whole program by libtpu's own estimates, for ratios only: it has none for copies."""
        return self._cycles_of(re.search(r"^ENTRY %(\S+) ", self.text, re.MULTILINE)[1])

    def _cycles_of(self, computation: str) -> int:
        """Those of a computation; of a loop as often as it is known to turn, else once."""
        total = 0
        lines = self.text[re.search(rf"^(?:ENTRY )?%{re.escape(computation)} ", self.text, re.MULTILINE).start() :]
        for line in lines.partition("\n}")[0].splitlines():
            total += sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', line)))
            if body := re.search(r" while\(.*body=%([\w.-]+)", line):
                turns = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
                total += int(turns[1] if turns else 1) * self._cycles_of(body[1])
        return total


def _factors(i: Instruction) -> tuple[str, ...]:
    """The two operands of a product; none of other instructions."""
    if i.kind == "custom-call" and "/ragged_dot" in i.origin:
        return i.operands[-2:]
    return i.operands[:2] if i.kind in ("convolution", "dot") else ()


def _is_rounded_here(within: dict[str, Instruction], name: str) -> bool:
    """Whether a number in 8 or 16 bits was float32 in the same computation."""
    i = within[name]
    if i.kind == "convert":
        return i.dtype.startswith(_NARROW) and within[i.operands[0]].dtype == "f32"
    return i.kind in _UNCHANGED and any(_is_rounded_here(within, operand) for operand in i.operands)


def _only_cast_back(within: dict[str, Instruction], name: str, narrow: str) -> bool:
    """Whether all that reads a float32 number casts it to this dtype, which it had before."""
    readers = [i for i in within.values() if name in i.operands]
    return bool(readers) and all(
        i.dtype == narrow
        if i.kind == "convert"
        else i.kind in _UNCHANGED and i.dtype == "f32" and _only_cast_back(within, i.name, narrow)
        for i in readers
    )


@functools.cache
def _devices_of(tpu: str) -> list[jax.Device] | str:
    """The four chips' devices, or why they cannot be described."""
    with mock.patch.dict(os.environ, WITHOUT_A_TPU):
        try:
            return topologies.get_topology_desc(platform="tpu", topology_name=TPUS[tpu]).devices
        except Exception as error:
            return f"no compiler for TPUs: {str(error).splitlines()[0]}; pip install the extra tpu-check"


def devices_of(tpu: str) -> list[jax.Device]:
    """Descriptions of a TPU's devices, to compile for. Skips the test where libtpu is missing."""
    found = _devices_of(tpu)
    if isinstance(found, str):
        pytest.skip(found)
    return found


by_tpu = pytest.mark.parametrize("tpu", ["7x", *(pytest.param(tpu, marks=pytest.mark.slow) for tpu in ("v6e", "v5e"))])
"""Tests with the newest TPU, with --slow with all."""


def compiled(function, *args, devices, **options) -> Program:
    """What libtpu makes of a function. Arguments are shapes; those without a sharding are on the first device."""
    single = jax.sharding.SingleDeviceSharding(devices[0])

    def placed(leaf):
        sharding = leaf.sharding if isinstance(getattr(leaf, "sharding", None), jax.sharding.NamedSharding) else single
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    traced = jax.jit(function, **options).trace(*jax.tree.map(placed, args))
    return Program.of(traced.lower(lowering_platforms=("tpu",)).compile())
