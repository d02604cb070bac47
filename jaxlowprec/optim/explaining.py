"""`explain_state`: the leaves of an optimizer's state, their codes and bytes, and why some stay as they are."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec.optim.rules import path_of
from jaxlowprec.optim.wrapping import Explained, check_transformation, checked_shapes, described


@dataclasses.dataclass(frozen=True)
class StateLeaf:
    """A leaf of an optimizer's state.

    Attributes:
        path: the keys that lead to it in the state.
        shape: its shape.
        dtype: the dtype in which it is stored.
        nbytes: bytes of the whole array.
        code: how numbers are stored in it, in words; "" if as they are.
        why: why it stays as it is; "" if it does not, or if it is part of no wrapper.
        one_pass: whether it is read and written in the one pass of an update, without arrays between; False if it is
            part of no wrapper.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    code: str = ""
    why: str = ""
    one_pass: bool = False


@dataclasses.dataclass(frozen=True)
class StateExplanation:
    """The leaves of an optimizer's state; str() is a table.

    Attributes:
        leaves: in the order of the state.
        elements: of the parameters.
    """

    leaves: tuple[StateLeaf, ...]
    elements: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole state."""
        return sum(leaf.nbytes for leaf in self.leaves)

    def __str__(self) -> str:
        rows = [("leaf", "stored as", "bytes", "code")]
        for leaf in self.leaves:
            stored = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
            note = leaf.code or (f"stays: {leaf.why}" if leaf.why else "")
            note += "; one pass" if leaf.one_pass else ""
            rows.append((leaf.path, stored, str(leaf.nbytes), note))
        share = f"{self.nbytes / self.elements:.2f} per parameter" if self.elements else ""
        rows.append(("all", "", str(self.nbytes), share))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)


def explain_state(tx: Any, params: Any) -> StateExplanation:
    """Explains the state that a transformation would have: each leaf, its code and bytes, and why it has no code.

    Arguments:
        tx: an `optax.GradientTransformation`, with `quantized_state` or `master_weights` anywhere in it, or without.
        params: arrays or their shapes; nothing is computed.

    Returns:
        A table when printed. Bytes are those of whole arrays.

    Raises:
        TypeError: `tx` is no transformation, or `params` has something else.

    >>> import jax.numpy as jnp, optax, jaxlowprec as jlp
    >>> tx = jlp.optim.quantized_state(optax.sgd(0.1, momentum=0.9))
    >>> print(jlp.optim.explain_state(tx, {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}))
    leaf                 stored as    bytes  code
    codes/0/trace/b      float32[64]  256    stays: a vector
    codes/0/trace/w      int8[64,64]  4096   int8 1x32, stochastic
    exponents/0/trace/w  uint8[64,2]  128    exponents
    words                uint32[2]    8
    step                 uint32[]     4
    version              int32[]      4
    all                               4496   1.08 per parameter
    """
    check_transformation("explain_state", "tx", tx)
    leaves = tuple(_rows(described(tx, checked_shapes("explain_state", "params", params)), (), {}))
    return StateExplanation(leaves, sum(math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(params)))


def _rows(tree: Any, above: tuple[str, ...], notes: dict[str, Any]) -> list[StateLeaf]:
    """The leaves of a state, or of a part of it at that place whose notes are by paths within it."""
    found = []
    is_wrapper = lambda node: isinstance(node, Explained)  # noqa: E731
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_wrapper):
        path = path_of(keys)
        place = (*above, path) if path else above
        if isinstance(leaf, Explained):
            within = {p.removeprefix(f"{path}/state/"): n for p, n in notes.items() if p.startswith(f"{path}/state/")}
            found += _rows(leaf.state, place, within | dict(leaf.notes))
        else:
            nbytes = leaf.size * leaf.dtype.itemsize
            found.append(StateLeaf("/".join(place), leaf.shape, str(leaf.dtype), nbytes, *notes.get(path, ())))
    return found
