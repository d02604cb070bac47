"""The axes that an einsum's subscripts name, and the matrices [batch..., K, N] that a kernel consists of.

    "btd,dnh->btnh"    kernel [d, n, h]    matrices [d, n h]
    "btnh,hnd->btd"    kernel [h, n, d]    matrices [n h, d]: K is in the order of the input's axes
    "etd,edf->etf"     kernel [e, d, f]    matrices [e, d, f]

Blocks of a quantised kernel run along K, so a kernel that is loaded quantised has the shape of its matrices.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec.arguments import a_text, shown

_TERM = r"[A-Za-z]*(\.\.\.)?[A-Za-z]*"
_SUBSCRIPTS = re.compile(rf"{_TERM}(,{_TERM})*(->{_TERM})?")


def has_matrices(shape: tuple[int, ...]) -> bool:
    """Whether at least two axes are longer than 1."""
    return sum(n != 1 for n in shape) > 1


@dataclasses.dataclass(frozen=True)
class KernelAxes:
    """The axes of a kernel that make up its matrices [batch..., K, N].

    Axes are counted without those that a stack of layers has in front, which count as batch axes.

    Attributes:
        batch: those that a product keeps, in their order.
        contracted: those that K consists of, in the order of the input's axes; none if the product is no GEMM.
        free: those that N consists of, in their order.
    """

    batch: tuple[int, ...]
    contracted: tuple[int, ...]
    free: tuple[int, ...]

    @classmethod
    def in_front(cls, batch: int, contracted: int, ndim: int) -> KernelAxes:
        """The axes of a kernel [batch..., contracted..., free...], given how many batch and contracted axes it has."""
        axes = tuple(range(ndim))
        return cls(axes[:batch], axes[batch : batch + contracted], axes[batch + contracted :])

    @property
    def order(self) -> tuple[int, ...]:
        """The kernel's axes in the order of its matrices."""
        return (*self.batch, *self.contracted, *self.free)

    def sizes(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The matrices' shape [batch..., K, N], by that of the kernel."""
        k, n = (math.prod(shape[a] for a in axes) for axes in (self.contracted, self.free))
        return (*(shape[a] for a in self.batch), k, n)

    def matrices(self, kernel: jax.Array) -> jax.Array:
        """The kernel as matrices."""
        stack = kernel.ndim - len(self.order)
        ordered = kernel.transpose(*range(stack), *(stack + a for a in self.order))
        return ordered.reshape(*kernel.shape[:stack], *self.sizes(kernel.shape[stack:]))

    def kernel(self, matrices: jax.Array, shape: Sequence[int]) -> jax.Array:
        """The kernel of that shape, without a stack's axes, that consists of these matrices."""
        stack = matrices.ndim - len(self.batch) - 2
        ordered = matrices.reshape(*matrices.shape[:stack], *(shape[a] for a in self.order))
        back = (stack + self.order.index(a) for a in range(len(shape)))
        return ordered.transpose(*range(stack), *back)


def kernel_axes(who: str, subscripts: str, x_ndim: int, w_ndim: int) -> KernelAxes:
    """The axes of an einsum's second operand.

    Raises:
        ValueError: the subscripts do not fit; or the product is by a sum or a diagonal of the kernel, not by itself.
    """
    (x_names, w_names), out = parse(who, subscripts, x_ndim, w_ndim)
    alone = [n for i, n in enumerate(w_names) if n in w_names[:i] or not (n in x_names or n in out)]
    if alone:
        raise ValueError(
            f"{who}: {subscripts!r} sums or repeats the axis {alone[0]!r} of the kernel before it is multiplied, so "
            "the kernel itself is in no matrix product"
        )
    batch = tuple(i for i, n in enumerate(w_names) if n in x_names and n in out)
    free = tuple(i for i, n in enumerate(w_names) if n not in x_names)
    return KernelAxes(batch, tuple(w_names.index(n) for n in contracted_names(x_names, w_names, out)), free)


def contracted_names(x_names: list[str], w_names: list[str], out: list[str]) -> list[str]:
    """The axes that both operands have and the result has not, in the order of the input's."""
    return [n for n in dict.fromkeys(x_names) if n in w_names and n not in out]


def input_ndim(subscripts: str, kernel_ndim: int) -> int:
    """The least number of axes of an einsum's input, by the axes of its kernel."""
    x, _, rest = subscripts.replace(" ", "").partition(",")
    spare = kernel_ndim - sum(map(str.isalpha, rest.partition("->")[0])) if "..." in x else 0
    return sum(map(str.isalpha, x)) + max(0, spare)


def kernel_axes_in_result(subscripts: str, x_ndim: int, kernel_shape: Sequence[int]) -> tuple[int, ...]:
    """The shape in which a bias over the kernel's remaining axes broadcasts against an einsum's result."""
    (_, names), out = parse("einsum", subscripts, x_ndim, len(kernel_shape))
    sizes = dict(zip(names, kernel_shape, strict=True))
    return tuple(sizes.get(n, 1) for n in out)


def parse(who: str, subscripts: Any, *ndims: int) -> tuple[list[list[str]], list[str]]:
    """Axis names of each operand and of the result; those of "..." are numbered from the right, as in broadcasting."""
    a_text(who, subscripts=subscripts)
    text = subscripts.replace(" ", "")
    if not _SUBSCRIPTS.fullmatch(text):
        raise ValueError(f'{who}: subscripts={shown(subscripts)}; needs letters and "...", such as "btd,dh->bth"')
    inputs, arrow, out = text.partition("->")
    terms = inputs.split(",")
    if len(terms) != len(ndims):
        raise ValueError(f"{who}: {subscripts!r} names {len(terms)} operands, given {len(ndims)}")
    named, widest = [], 0
    for term, ndim in zip(terms, ndims, strict=True):
        before, dots, after = term.partition("...")
        spare = ndim - len(before) - len(after)
        if spare < 0 or (spare and not dots):
            raise ValueError(f"{who}: {term!r} of {subscripts!r} does not fit an operand of {ndim} dimensions")
        named.append([*before, *[f"...{i}" for i in reversed(range(spare))], *after])
        widest = max(widest, spare)
    ellipsis = [f"...{i}" for i in reversed(range(widest))]
    if arrow:
        before, dots, after = out.partition("...")
        result = [*before, *(ellipsis if dots else []), *after]
    else:
        letters = inputs.replace(",", "").replace(".", "")
        result = ellipsis + sorted(n for n in set(letters) if letters.count(n) == 1)
    unknown = [n for n in result if not any(n in names for names in named)]
    if unknown or len(set(result)) != len(result):
        raise ValueError(f"{who}: the result of {subscripts!r} names an axis twice or one that no operand has")
    return named, result


def reduce_alone(x: jax.Array, names: list[str], keep: set[str]) -> tuple[jax.Array, list[str]]:
    """x with repeated axes reduced to their diagonal, and with axes that no other operand or result names summed."""
    left = [n for n in dict.fromkeys(names) if n in keep]
    if left == names:
        return x, names
    index = {n: i for i, n in enumerate(dict.fromkeys(names))}
    return jnp.einsum(x, [index[n] for n in names], [index[n] for n in left]), left
