"""Several schemes in one checkpoint: each module has that of the first target that names it.

compressed-tensors' "config_groups" have targets: names of modules, "re:" and a regular expression that is matched from
a name's start, or names of classes, such as "Linear". As in compressed-tensors, a name comes before an expression, an
expression before a class, and expressions have the order of their text. ModelOpt's "quantized_layers" name modules.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from jaxlowprec.arrays.formats import Format
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.checkpoints.errors import brief
from jaxlowprec.checkpoints.schemes.base import Scheme, Spec, Tensors
from jaxlowprec.checkpoints.schemes.expressions import Expression

MOST_POSITIONS = 4096
"""The most of all expressions that are no plain text together: each module's name is compared with each of them."""


def _is_embedding(module: str) -> bool:
    last = module.rpartition(".")[2]
    if last in ("wte", "wpe", "shared"):  # shared: T5's
        return True
    return "embed" in last and "proj" not in last and last != "embed_out" and not last.startswith("unembed")


CLASSES: Mapping[str, Callable[[str], bool]] = {
    "Linear": lambda module: not _is_embedding(module),
    "LinearBase": lambda module: not _is_embedding(module),
    "Embedding": _is_embedding,
}
"""Classes of quantised modules, by the modules' names: a checkpoint does not say them otherwise."""


@dataclasses.dataclass(frozen=True)
class ConfigGroup:
    """The modules of one scheme, an entry of compressed-tensors' `config_groups`.

    Attributes:
        targets: what names them.
        scheme: their scheme.
    """

    targets: tuple[str, ...]
    scheme: Scheme


@dataclasses.dataclass(frozen=True)
class Mixed(Scheme):
    """The schemes of a checkpoint whose modules are in different formats.

    `of_module` has the scheme of a module. Without a name, `load` and `decompress` take the first scheme that a
    module's tensors fit, and `store` the first one that holds an array.

    Arguments:
        groups: the modules of each scheme. All schemes are of one family.

    Raises:
        ValueError: groups of different families, or without one; a target that is not valid, or in two groups.
    """

    groups: tuple[ConfigGroup, ...]

    name: ClassVar[str] = "mixed"

    def __post_init__(self):
        if not self.groups:
            raise ValueError("mixed: there are no groups; needs one or more")
        if why := why_not_together(self.schemes):
            raise ValueError(f"mixed: {why}")
        seen: dict[str, Scheme] = {}
        for group in self.groups:
            for target in group.targets:
                check_target(target)
                if seen.setdefault(target, group.scheme) != group.scheme:
                    raise ValueError(
                        f"mixed: target {brief(target)} is in groups of {seen[target].name} and of "
                        f"{group.scheme.name}; needs one group for each target"
                    )
        if (size := sum(expression.size for _, expression in self._expressions)) > MOST_POSITIONS:
            raise ValueError(
                f"mixed: the regular expressions of the targets have {size} characters together; at most "
                f"{MOST_POSITIONS} are matched: name the modules"
            )

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """The different schemes, in the order of the groups."""
        return tuple(dict.fromkeys(group.scheme for group in self.groups))

    @property
    def required(self) -> tuple[str, ...]:  # type: ignore[override]
        """None: the schemes need different tensors."""
        return ()

    @property
    def optional(self) -> tuple[str, ...]:  # type: ignore[override]
        """All tensors of all schemes."""
        return tuple(dict.fromkeys(name for s in self.schemes for name in (*s.required, *s.optional)))

    @property
    def format(self) -> Format:
        """Raises ValueError: each module has its own."""
        raise ValueError(self._by_module("format"))

    @property
    def has_tensor_scale(self) -> bool:
        """Raises ValueError: each module has its own."""
        raise ValueError(self._by_module("has_tensor_scale"))

    @functools.cached_property
    def _targets(self) -> dict[str, Scheme]:
        return {target: group.scheme for group in self.groups for target in group.targets}

    @functools.cached_property
    def _parsed(self) -> dict[str, Expression]:
        return {target: Expression(target.removeprefix("re:")) for target in self._targets if target.startswith("re:")}

    @functools.cached_property
    def _beginnings(self) -> dict[str, str]:
        """The targets that are expressions of plain text, by that text; those of experts are, and there are many."""
        return {e.literal: target for target, e in self._parsed.items() if e.literal is not None}

    @functools.cached_property
    def _lengths(self) -> list[int]:
        return sorted({len(beginning) for beginning in self._beginnings})

    @functools.cached_property
    def _expressions(self) -> list[tuple[str, Expression]]:
        """The other expressions, in their order."""
        return sorted((target, e) for target, e in self._parsed.items() if e.literal is None)

    @functools.cached_property
    def _classes(self) -> list[str]:
        return sorted(target for target in self._targets if target in CLASSES)

    def of_module(self, module: str) -> Scheme | None:
        """See `Scheme`."""
        if module in self._targets:
            return self._targets[module]
        targets = [self._beginnings.get(module[:length]) for length in self._lengths if length <= len(module)]
        first = min((target for target in targets if target is not None), default=None)
        for target, expression in self._expressions:
            if first is not None and first < target:
                break
            if expression.matches(module):
                return self._targets[target]
        first = first or next((target for target in self._classes if CLASSES[target](module)), None)
        return None if first is None else self._targets[first]

    def why_no_scheme(self, module: str) -> str:
        """See `Scheme`."""
        targets = ", ".join(list(self._targets)[:8])
        return f"no target of the configuration names it; there are {len(self._targets)}, such as {targets}"

    def quantization_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """See `Scheme`."""
        if self.groups[0].scheme.family == "modelopt":
            return self._modelopt_config(ignore)
        groups: dict[str, Any] = {}
        for i, group in enumerate(self.groups):
            (entry,) = group.scheme.quantization_config([])["config_groups"].values()
            groups[f"group_{i}"] = {**entry, "targets": list(group.targets)}
        formats = {entry["format"] for entry in groups.values()}
        config = self.groups[0].scheme.quantization_config(ignore)
        return {
            **config,
            "format": "mixed-precision" if len(formats) > 1 else next(iter(formats)),
            "config_groups": groups,
        }

    def _modelopt_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        self._refuse_regexes([*ignore, *self._targets])
        layers: dict[str, Any] = {}
        for group in self.groups:
            config = group.scheme.quantization_config([])
            entry = {key: config[key] for key in ("quant_algo", "group_size") if key in config}
            layers |= dict.fromkeys(group.targets, entry)
        config = self.groups[0].scheme.quantization_config(ignore)
        config.pop("group_size", None)
        return {**config, "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}

    def check(self, shape: Sequence[int]) -> str | None:
        """Raises ValueError: each module has its own."""
        raise ValueError(self._by_module("check"))

    def output_specs(self, shape: Sequence[int], dtype: Any = "bfloat16") -> dict[str, Spec]:
        """Raises ValueError: each module has its own."""
        raise ValueError(self._by_module("output_specs"))

    def compress(self, weight: np.ndarray, *, amax: float | None = None) -> dict[str, np.ndarray]:
        """Raises ValueError: each module has its own."""
        raise ValueError(self._by_module("compress"))

    def shape_of(self, tensors: Tensors) -> tuple[int, int]:
        """See `Scheme`."""
        return self._fitting(tensors, "shape_of").shape_of(tensors)

    def decompress(self, tensors: Tensors, dtype: Any = "bfloat16") -> np.ndarray:
        """See `Scheme`."""
        return self._fitting(tensors, "decompress").decompress(tensors, dtype)

    def load(self, tensors: Tensors, dtype: Any = "bfloat16") -> QuantizedArray:
        """See `Scheme`."""
        return self._fitting(tensors, "load").load(tensors, dtype)

    def store(self, q: QuantizedArray) -> dict[str, np.ndarray]:
        """See `Scheme`. Takes the first scheme that holds the array."""
        if not isinstance(q, QuantizedArray):
            raise TypeError(f"mixed.store: q is a {type(q).__name__}; needs a QuantizedArray")
        for scheme in self.schemes:
            if scheme.holds(q):
                return scheme.store(q)
        raise ValueError(f"mixed.store: q has format {q.format!r}; there are {', '.join(s.name for s in self.schemes)}")

    def _fitting(self, tensors: Tensors, verb: str) -> Scheme:
        """The first scheme that the tensors of a module fit."""
        reasons = []
        for scheme in self.schemes:
            stored = scheme.as_stored({name: tensor.dtype.name for name, tensor in tensors.items()})
            try:
                stored.shape_of(tensors)
            except ValueError as error:
                reasons.append(str(error))
            else:
                return stored
        raise ValueError(f"mixed.{verb}: the tensors fit none of the checkpoint's schemes ({'; '.join(reasons)})")

    def _by_module(self, what: str) -> str:
        return f"mixed.{what}: modules are in different formats; take it from the scheme that `of_module(name)` gives"

    def _shape(self, tensors: Tensors) -> tuple[int, int]:
        return self.shape_of(tensors)

    def _decode(self, tensors: Tensors, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
        return self.decompress(tensors, dtype)

    def _read(self, tensors: Tensors, shape: tuple[int, int], dtype: np.dtype) -> QuantizedArray:
        return self.load(tensors, dtype)

    def _write(self, q: QuantizedArray) -> dict[str, np.ndarray]:
        return self.store(q)


def why_not_together(schemes: Sequence[Scheme]) -> str | None:
    """Why no configuration names these schemes beside others; None if one does: all are of one family."""
    families = {scheme.family for scheme in schemes}
    if None not in families and len(families) == 1:
        return None
    kinds = "; ".join(f"{s.name}: {s.family or 'no other scheme beside it'}" for s in schemes)
    return (
        f"no config names these schemes together ({kinds}); choose several of compressed-tensors, or several of "
        "modelopt"
    )


def check_target(target: object) -> None:
    """Raises ValueError unless it is a valid target."""
    if not isinstance(target, str) or target in ("", "re:"):
        raise ValueError(
            f'target {brief(target)} is not valid; needs the name of a module or of a class, or "re:" and a regular '
            "expression"
        )
    if target.startswith("re:"):
        try:
            Expression(target.removeprefix("re:"))
        except ValueError as error:
            raise ValueError(f"target {brief(target)} is not a valid regular expression: {error}") from None
