"""The traffic of a compiled function between devices: its collectives, and the bytes that they send.

    with jax.set_mesh(mesh):
        compiled = jax.jit(step).lower(parameters, batch).compile()
    for collective in jaxlowprec.traffic.collectives(compiled):
        print(collective)

The counts come from the text of the program that XLA made. A collective in a loop (`scan`) is listed once.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from jaxlowprec.arguments import shown

_KINDS = "all-reduce|all-gather|all-to-all|ragged-all-to-all|reduce-scatter|collective-permute|collective-broadcast"
_INSTRUCTION = re.compile(rf" = (.*?) ({_KINDS})(-start)?\(")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_BITS = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled function. Collectives that XLA combined count as one.

    Attributes:
        kind: "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", ...
        results: dtype (XLA's name: "u8", "bf16", "f32") and shape of each array that a device has afterwards.
        devices: the number of devices in each group that exchanges data.
        most: of a ragged all-to-all, whose sizes only the devices know: bytes that a device sends at most, on average
            over the devices; the smaller of its operand and its result. None: of any other.
    """

    kind: str
    results: tuple[tuple[str, tuple[int, ...]], ...]
    devices: int
    most: int | None = None

    @property
    def elements(self) -> int:
        """The number of elements of all results."""
        return sum(math.prod(shape) for _, shape in self.results)

    @property
    def nbytes(self) -> int:
        """Bytes of all results."""
        return sum(math.prod(shape) * _bits(dtype) for dtype, shape in self.results) // 8

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends, with the algorithms that send the fewest (rings); see also `most`."""
        others = self.devices - 1
        if self.most is not None:
            return self.most
        if self.kind == "reduce-scatter":
            return self.nbytes * others  # each result is one device's part
        if self.kind == "all-reduce":
            return 2 * self.nbytes * others / self.devices
        if self.kind == "collective-permute":
            return self.nbytes
        return self.nbytes * others / self.devices

    def __str__(self) -> str:
        shapes = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in self.results)
        count = f"{self.wire_bytes:,.0f}" if self.most is None else f"at most {self.most:,}"
        return f"{self.kind} among {self.devices}: {shapes}, {count} bytes sent by each"


def collectives(compiled: Any) -> list[Collective]:
    """The collectives of a compiled function in the order of its text.

    Arguments:
        compiled: the result of `jax.jit(f).lower(...).compile()`, or its text.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> jlp.traffic.collectives(jax.jit(lambda x: x + 1).lower(jnp.ones(4)).compile())
    []
    """
    if not isinstance(compiled, str) and not callable(getattr(compiled, "as_text", None)):
        raise TypeError(f"collectives: compiled={shown(compiled)}; needs jax.jit(f).lower(...).compile(), or its text")
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    found = (m for line in text.splitlines() if (m := _INSTRUCTION.search(line)))
    return [_ragged(m, text) if m[2].startswith("ragged") else _collective(m[1], m[2], m[3], m.string) for m in found]


def _ragged(found: re.Match[str], text: str) -> Collective:
    """A ragged all-to-all. Its offsets and sizes are one-dimensional arrays of integers."""
    rows = [array for array in _arrays(found[1]) if array[0] not in ("s32", "s64") or len(array[1]) != 1]
    operand, result = rows[0], rows[-1]
    if not found[3]:  # the type is that of the result alone; the operand's is beside it, or where that was made
        written = found.string[found.end() :]
        name = re.match(r"%?([\w.-]+)[,)]", written)
        if name:
            made = re.search(rf"^\s*%?{re.escape(name[1])} = (.*)$", text, re.MULTILINE)
            written = made[1] if made else ""
        operand = (_arrays(written) or rows)[0]
    sizes = [math.prod(shape) * _bits(dtype) // 8 for dtype, shape in (operand, result)]
    return Collective(found[2], (result,), _group_size(found.string, 1), min(sizes))


def _arrays(types: str) -> list[tuple[str, tuple[int, ...]]]:
    """The dtypes and shapes in XLA's text of a type."""
    return [(dtype, tuple(int(n) for n in dims.split(",") if n)) for dtype, dims in _ARRAY.findall(types)]


def _collective(types: str, kind: str, start: str | None, line: str) -> Collective:
    operands = _operands(types) if start else ""
    types = types[len(operands) :]
    arrays = _arrays(types)
    if start and kind == "collective-permute":
        arrays = arrays[1:2]  # operand, result, two contexts
    elif start and not operands and kind != "all-reduce":
        arrays = arrays[len(arrays) // 2 :]  # operands, results
    return Collective(kind, tuple(arrays), _group_size(line, len(arrays) if kind == "all-to-all" else 1))


def _operands(types: str) -> str:
    """The beginning of the type of an instruction that starts a collective, up to the results, where the operands are
    a tuple of their own: "((f32[8]), f32[8])". Some versions of XLA print them so; else ""."""
    if not types.startswith("(("):
        return ""
    depth = 0
    for place, letter in enumerate(types[1:], start=1):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0:
            return types[: place + 1]
    return ""


def _group_size(line: str, results: int) -> int:
    """The size of a group, from any of the forms in which XLA prints groups: a list, an array, or axes of a mesh."""
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return listed[1].count(",") + 1
    if shaped := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(shaped[1])
    if meshed := re.search(r"replica_groups=mesh\[([^]]*)\][^{]*\{([^}]*)\}", line):
        sizes = dict(re.findall(r"('\w+')=(\d+)", meshed[1]))
        axes = re.findall(r"('\w+')(?::\(\d+\)(\d+))?", meshed[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    return max(results, 2 if "source_target_pairs" in line else 1)


def _bits(dtype: str) -> int:
    """Bits per element: pred takes a byte, other names contain the number (f8e4m3fn)."""
    found = _BITS.search(dtype)
    return int(found[0]) if found else 8
