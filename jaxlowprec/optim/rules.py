"""Rules choose the code of each leaf of an optimizer's state, or say why it stays as it is.

A rule names a field that the class of a state has, "nu", or also the class, "ScaleByAdamState.nu". Keys of dicts are
names of parameters and never match: a layer may be called "mu". A state of zeros does not show whether its numbers have
signs, so nothing is guessed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from jaxlowprec.arguments import shown
from jaxlowprec.optim.codes import FixedCode, RelativeCode, StateCode
from jaxlowprec.optim.wrapping import Explained

SIGNED = RelativeCode(signed=True)
"""The default code of first moments that are divided by the root of a second one, and of Lion's."""
UNSIGNED = RelativeCode(signed=False)
"""The default code of second moments."""
FIXED = FixedCode()
"""The default code of momentum that is not divided, SGD's."""
_ADAMS = ("ScaleByAdamState", "ScaleByAmsgradState", "ScaleByBeliefState", "ScaleByNovogradState")
RULES: dict[str, StateCode | None] = {
    **{f"{name}.mu": SIGNED for name in (*_ADAMS, "ScaleByLionState")},
    **{f"{name}.nu": UNSIGNED for name in (*_ADAMS, "ScaleByRmsState", "ScaleByRmsWithCountState")},
    "TraceState.trace": FIXED,
    "MuonState.mu": FixedCode("nearest"),  # orthogonalised: noise costs more there than a size that is off
}
"""The default codes, by the class of an optax state and its field.

Other classes have fields of these names that mean something else: the second one of SM3 has signs, and those of centred
RMSProp are subtracted from each other.
"""

Rules = Mapping[str, StateCode | None] | Callable[[str, Any], StateCode | None] | None
CODED = ("float32", "bfloat16")
"""The dtypes of leaves that have codes: both hold every number that a code stands for."""


class Choice(NamedTuple):
    """A leaf of the inner state, and its code or why it has none.

    Attributes:
        path: the keys that lead to it, "0/mu/layer/kernel".
        place: those without the field that a rule names, "0/layer/kernel": moments of an element have the same draw.
        code: None: it stays as it is.
        note: why.
    """

    path: str
    place: str
    code: StateCode | None
    note: str = ""


def path_of(path: Any) -> str:
    """The keys of a path, joined: the same for attributes, dicts and lists."""
    return "/".join(str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", k)))) for k in path)


def check_rules(rules: Any) -> None:
    """Raises TypeError unless the rules are a function, or a mapping of names to codes; None: those by default."""
    if rules is None or callable(rules):
        return
    if not isinstance(rules, Mapping):
        raise TypeError(
            f"quantized_state: rules={shown(rules)}; needs a mapping such as {{'nu_max': jlp.optim.UNSIGNED}}, or a "
            "function of a leaf's path and the leaf"
        )
    for name, code in rules.items():
        if not isinstance(name, str):
            raise TypeError(f"quantized_state: rules has the key {shown(name)}; needs names of the state's fields")
        _check_code(f"rules[{name!r}]", code)


def choose(tree: Any, params: Any, rules: Rules, smallest: int) -> list[Choice]:
    """The choice for each leaf of an inner state, in the order of its leaves.

    Arguments:
        tree: arrays or their shapes; of whole arrays, so that no mesh changes a choice.
        params: the parameters; where there are none, as in what `optax.tree_map_params` passes, no rule is in vain.
        rules: names that are given go before those by default. Or a function of a leaf's path and the leaf.
        smallest: leaves of fewer elements keep their dtype, unless the rules are a function.

    Raises:
        TypeError: a function gave something other than a code or None, or a code to a leaf that can have none.
        ValueError: a name is that of no field of floats.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if callable(rules):
        return [_chosen(rules, path_of(path), _place(path, [*_fields(tree, path)], {}), leaf) for path, leaf in leaves]
    given: Mapping[str, StateCode | None] = rules or {}
    merged, used = {**RULES, **given}, set()
    choices = []
    for path, leaf in leaves:
        fields = [*_fields(tree, path)]
        names = [*_named(fields, given)] or [*_named(fields, RULES)]
        note = _unfit(leaf)
        if not note:
            used.update(names)
            if leaf.ndim < 2:
                note = "a vector" if leaf.ndim else "a number"
            elif not names:
                note = "no rule names it, so its sign is unknown"
            elif merged[names[0]] is None:
                note = f"kept by rules[{names[0]!r}]"
            elif leaf.size < smallest:
                note = f"{leaf.size} elements; smallest={smallest}"
        choices.append(Choice(path_of(path), _place(path, fields, given), None if note else merged[names[0]], note))
    if (unused := sorted(set(given) - used)) and jax.tree.leaves(params):
        last = sorted({name for path, leaf in leaves if not _unfit(leaf) for *_, name in [*_fields(tree, path)][-1:]})
        raise ValueError(
            f"quantized_state: rules[{unused[0]!r}] names no field of floats in the state of this transformation; its "
            f"last fields are {', '.join(last) or 'none'}: name one of these, or leave the rule out"
        )
    return choices


def _chosen(rules: Callable[[str, Any], Any], path: str, place: str, leaf: Any) -> Choice:
    """The choice of a function for one leaf."""
    code = rules(path, leaf)
    if code is None:
        return Choice(path, place, None, _unfit(leaf) or "kept by rules")
    _check_code(f"rules({path!r}, leaf)", code)
    if (note := _unfit(leaf)) or not leaf.ndim:
        raise TypeError(
            f"quantized_state: rules gave {code} to {path!r}, which is {note or 'a number'}; codes are for arrays of "
            f"{' or '.join(CODED)}: return None for it"
        )
    return Choice(path, place, code)


def _check_code(name: str, code: Any) -> None:
    if code is not None and not isinstance(code, RelativeCode | FixedCode):
        raise TypeError(
            f"quantized_state: {name} is {shown(code)}; needs jlp.optim.SIGNED, UNSIGNED or FIXED, a RelativeCode, a "
            "FixedCode, or None to keep it"
        )


def _unfit(leaf: Any) -> str:
    """Why a leaf can have no code, in words; "" if it can."""
    dtype = getattr(leaf, "dtype", jnp.int32)
    return "" if str(dtype) in CODED else f"{dtype}"


_Field = tuple[int, str, str]
"""Where in a path a field is, and its names: "MuonState.mu" and "mu"."""


def _named(fields: Iterable[_Field], rules: Container[str]) -> Iterator[str]:
    """The names of fields that rules have, from the outermost."""
    return (name for _, *both in fields for name in both if name in rules)


def _place(path: Any, fields: list[_Field], given: Container[str]) -> str:
    """The path of a leaf without the outermost field that a rule names, those by default first.

    Fields further in are the parameters' own, which may be named tuples or dataclasses, too.
    """
    for rules in (RULES, given):
        for field in fields:
            if any(_named([field], rules)):
                return path_of([key for at, key in enumerate(path) if at != field[0]])
    return path_of(path)


def _fields(tree: Any, path: Any) -> Iterator[_Field]:
    """The fields on the way to a leaf, from the outermost."""
    node = tree
    for at, key in enumerate(path):
        try:
            if isinstance(node, Explained):
                node = node.state
            elif isinstance(key, GetAttrKey) and (hasattr(node, "_fields") or dataclasses.is_dataclass(node)):
                yield at, f"{type(node).__name__}.{key.name}", key.name
                node = getattr(node, key.name)
            elif isinstance(key, DictKey | SequenceKey):
                node = node[key.key if isinstance(key, DictKey) else key.idx]
            else:
                return
        except (AttributeError, TypeError, LookupError):
            return
