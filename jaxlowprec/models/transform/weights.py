"""Values of a traced function that are parameters, perhaps moved, cut or cast."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.layers.low_rank import LoRAKernel
from jaxlowprec.layers.subscripts import has_matrices
from jaxlowprec.ops.checks import FLOATS

# Primitives whose first operand is moved or cut, and nothing else.
_LAYOUT = {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "dynamic_slice",
    "gather",
    "name",
    "pad",
    "reshape",
    "reshard",
    "rev",
    "sharding_constraint",
    "slice",
    "split",
    "squeeze",
    "stop_gradient",
    "tile",
    "transpose",
}
# Primitives that scale a parameter by a scalar, as reparametrisations by a layer's width do.
_SCALING = {"mul", "div"}
# Primitives that hand on each operand as the result of the same number.
_EACH = {"device_put", "optimization_barrier", "pvary"}
# Layout primitives that leave a loaded parameter loaded, beside the transposition of its matrices.
_KEEP_LOADED = {"convert_element_type", "copy", "name", "stop_gradient"}
# Layout primitives that leave a stack a stack, beside those that `_of_stack` looks at.
_KEEP_STACKS = _KEEP_LOADED | _EACH | _SCALING | {"reshard", "sharding_constraint"}


@dataclasses.dataclass(frozen=True)
class Weight:
    """Says which parameter a value is.

    Attributes:
        name: the layer's name: the parameter's path in its tree.
        leaf: the parameter's number among the function's array leaves.
        cast: the value has another dtype than the parameter. Then a master goes with it: the parameter itself, moved
            and cut in the same way.
        ends: of a stack of layers that no scan has taken apart yet: how many of the first and of the last layers stay
            in high precision; None otherwise.
        loaded: the parameter is a QuantizedArray or has an adapter. Then it is its own master, and the value that the
            function sees is made only where it is needed.
        shard: the value is a device's part, within `shard_map`.
        parts: the parameters that the value was joined from; name and leaf are those of the first. () of a single one.
        cuts: of a stack of parts, one for each number of the first axis: where the parts begin for which the recipe
            says something else, from 0 to the number of parts; None of any other value.
        in_turn: the value is one of its parts in each round of a scan.
        computed: the primitive by which the value was computed from parameters alone; "" if they were only moved.
        turned: a loaded parameter's last two axes are swapped.
    """

    name: str
    leaf: int
    cast: bool = False
    ends: tuple[int, int] | None = None
    loaded: bool = False
    shard: bool = False
    parts: tuple[Weight, ...] = ()
    cuts: tuple[int, ...] | None = None
    in_turn: bool = False
    computed: str = ""
    turned: bool = False

    @property
    def has_master(self) -> bool:
        """Whether a master goes with the value."""
        return (self.cast or self.loaded) and not self.computed

    @property
    def groups(self) -> list[tuple[Weight, ...]]:
        """The single parameters of the value: a group of those that are in one product."""
        if not self.parts:
            return [(self,)]
        of_parts = [part.groups for part in self.parts]
        if self.in_turn:
            return [group for groups in of_parts for group in groups]
        in_turn = len({len(groups) for groups in of_parts}) == 1  # in each round the parts' parts of that round
        together = zip(*of_parts, strict=True) if in_turn else [[group for groups in of_parts for group in groups]]
        return [tuple(single for group in groups for single in group) for groups in together]

    @property
    def singles(self) -> list[Weight]:
        """The single parameters of the value."""
        return [single for group in self.groups for single in group]


Weights = tuple[Weight | None, ...]


def is_float(aval: Any) -> bool:
    """Whether a value can be a weight, or a vector that weights are cut from."""
    return getattr(aval, "dtype", None) in FLOATS and aval.size > 1


def is_matrix(aval: Any) -> bool:
    """Whether a value can be a weight: a float array, at least two axes of which are longer than 1."""
    return is_float(aval) and has_matrices(aval.shape)


def moved(eqn: Any, weights: list[Weight | None]) -> list[Weight | None] | None:
    """The weights that are results of an equation that only moves, cuts or casts its operands; None for others."""
    name = eqn.primitive.name
    if name in _EACH and len(eqn.invars) == len(eqn.outvars):
        return list(weights)
    if name in _SCALING:
        return [_scaled(eqn, weights)]
    if name not in _LAYOUT:
        return None
    if name == "split":
        return _split(eqn, weights[0])
    before, after = eqn.invars[0].aval, eqn.outvars[0].aval
    weight = _cut(weights[0], before, after)
    if weight is None:
        return [None]
    if name in ("broadcast_in_dim", "tile") and after.size != before.size and not is_matrix(before):
        return [None]
    if name == "gather" and not (is_matrix(before) and eqn.invars[1].aval.ndim == 1):  # several rows of an embedding
        return [None]
    if weight.loaded and not (name in _KEEP_LOADED or _swaps_the_last_two(eqn)):
        return [None]
    if name == "convert_element_type":
        return [dataclasses.replace(weight, cast=True)]
    if weight.loaded and name == "transpose":
        return [dataclasses.replace(weight, turned=not weight.turned)]
    return [_of_stack(eqn, weight)]


def _scaled(eqn: Any, weights: list[Weight | None]) -> Weight | None:
    """A parameter times or divided by a scalar; None for other products."""
    at = source(eqn, 0)
    weight = weights[at]
    scales = eqn.invars[1 - at].aval.ndim == 0 and (eqn.primitive.name == "mul" or at == 0)
    return weight if scales and weight is not None and not weight.loaded else None


def _swaps_the_last_two(eqn: Any) -> bool:
    axes = eqn.params["permutation"] if eqn.primitive.name == "transpose" else ()
    return len(axes) > 1 and tuple(axes) == (*range(len(axes) - 2), len(axes) - 1, len(axes) - 2)


def _cut(weight: Weight | None, before: Any, after: Any) -> Weight | None:
    """A parameter, or a part of it; None if it is no weight any more: a row of an embedding is an activation."""
    row = is_matrix(before) and not is_matrix(after) and after.size < before.size
    return None if row or not is_float(after) else weight


def _split(eqn: Any, weight: Weight | None) -> list[Weight | None]:
    """The weights that are results of a split."""
    found, start = [], 0
    for size, result in zip(eqn.params["sizes"], eqn.outvars, strict=True):
        part = _cut(weight, eqn.invars[0].aval, result.aval)
        if part is not None and part.cuts is not None:
            part = part_of_stack(part, start, start + size) if eqn.params["axis"] == 0 else part
        found.append(part)
        start += size
    return found


def _of_stack(eqn: Any, weight: Weight) -> Weight:
    """The result of a layout primitive on a stack of parameters: the stack, a part of it, or only their array."""
    if weight.cuts is None or eqn.primitive.name in _KEEP_STACKS:
        return weight
    before, after, params = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, eqn.params
    match eqn.primitive.name:
        case "transpose":
            kept = params["permutation"][0] == 0
        case "reshape":
            kept = before[0] == after[0]
        case "slice" if params["strides"] is None or params["strides"][0] == 1:
            return part_of_stack(weight, params["start_indices"][0], params["limit_indices"][0])
        case _:
            kept = False
    return weight if kept else dataclasses.replace(weight, cuts=None)


def part_of_stack(weight: Weight, start: int, stop: int) -> Weight:
    """The stack of the parts from `start` to `stop`; the part itself if it is only one."""
    if stop - start == len(weight.parts):
        return weight
    if stop - start == 1:
        return dataclasses.replace(weight.parts[start], cast=weight.cast)
    cuts = sorted({0, stop - start, *(n - start for n in weight.cuts or () if start < n < stop)})
    return dataclasses.replace(joined(weight.parts[start:stop]), cast=weight.cast, cuts=tuple(cuts))


def joined(parts: Sequence[Weight]) -> Weight:
    """The parameter that several are together; a parameter with itself is that one."""
    first = parts[0]
    cast = any(part.cast for part in parts)
    if all(part == first for part in parts):
        return dataclasses.replace(first, cuts=None)
    return Weight(first.name, first.leaf, cast=cast, shard=first.shard, parts=tuple(parts))


def source(eqn: Any, number: int) -> int:
    """The number of the operand that a result of such an equation is."""
    if eqn.primitive.name in _SCALING:
        return 0 if eqn.invars[0].aval.ndim else 1
    return number if eqn.primitive.name in _EACH else 0


@dataclasses.dataclass(frozen=True)
class TracedValue:
    """A value of the function.

    Attributes:
        value: the value; None for a loaded parameter, see `array_of`.
        weight: the parameter that it is, or None.
        master: that parameter in its own dtype, moved and cut as the value is; the value itself if it was not cast.
    """

    value: Any
    weight: Weight | None = None
    master: Any = None


def traced(values: Any, weights: Any, masters: Any) -> list[TracedValue]:
    """Values with the parameters that they are. `masters` has those of the cast and the loaded ones, in order."""
    left = iter(masters)
    return [
        TracedValue(value, weight, None if weight is None else next(left) if weight.has_master else value)
        for value, weight in zip(values, weights, strict=True)
    ]


def masters_of(values: list[TracedValue]) -> list[Any]:
    """The masters of the cast and of the loaded ones, in order."""
    return [t.master for t in values if t.weight is not None and t.weight.has_master]


def is_loaded(master: Any) -> bool:
    """Whether a parameter is quantised, or has an adapter."""
    return isinstance(master, QuantizedArray | LoRAKernel)


def array_of(t: TracedValue, variable: Any) -> Any:
    """The value that a variable of the function has; a loaded parameter is decoded, and its adapter added."""
    if t.value is not None or t.master is None:
        return t.value
    dense = t.master.merged() if isinstance(t.master, LoRAKernel) else t.master.dequantize()
    return dense.astype(variable.aval.dtype)


def arrays_of(values: list[TracedValue], variables: Any) -> list[Any]:
    """See `array_of`."""
    return [array_of(t, v) for t, v in zip(values, variables, strict=True)]


def moved_master(eqn: Any, number: int, operands: list[TracedValue], values: list[Any]) -> Any:
    """The master of an equation's result of that number, made of its operands' masters; these keep their dtype.

    Arguments:
        values: the operands' values.
    """
    master = operands[source(eqn, number)].master
    if eqn.primitive.name in ("convert_element_type", "optimization_barrier"):
        return master
    if is_loaded(master):
        return master.mT if eqn.primitive.name == "transpose" else master
    dtype = jnp.result_type(*(t.master.dtype for t in operands if t.weight is not None))
    given = [value if t.weight is None else t.master for t, value in zip(operands, values, strict=True)]
    given = [jnp.asarray(v, dtype) if jnp.issubdtype(jnp.result_type(v), jnp.floating) else v for v in given]
    results = eqn.primitive.bind(*given, **eqn.params)
    return results[number] if eqn.primitive.multiple_results else results
