"""The trainer's tensors: the leaves of a tree in a fixed order, made bundle by bundle."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxlowprec.arguments import FLOATS, float_dtype_or_none, shown
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.checkpoints.conversion.plan import output_specs
from jaxlowprec.checkpoints.conversion.quantizing import amax
from jaxlowprec.checkpoints.conversion.rules import Rules, fused_units, require_one_scheme_in_a_unit, splits
from jaxlowprec.checkpoints.errors import brief
from jaxlowprec.checkpoints.files.dtypes import file_dtype
from jaxlowprec.checkpoints.files.safetensors_header import TensorSpec
from jaxlowprec.checkpoints.schemes.base import Scheme, require_scheme
from jaxlowprec.checkpoints.trees.kv_scales import require_cache_scales, with_kv_cache
from jaxlowprec.checkpoints.trees.leaf_tensors import LeafTensors, about
from jaxlowprec.checkpoints.trees.mapping import TreeMapping
from jaxlowprec.checkpoints.trees.tree_paths import leaves
from jaxlowprec.checkpoints.trees.trees import check_scales, with_scales
from jaxlowprec.ops.kv_cache import KVCache
from jaxlowprec.weight_sync.manifest import Entry, Manifest, described

PARTS = ("data", "scale", "amax", "zero_point", "signs")
"""The arrays of a QuantizedArray; each is sent if it exists."""


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Tensors that must arrive together: those of one module, or of modules that an engine fuses.

    Attributes:
        key: the bundle's name, such as "layers.0.mlp.gate_proj+up_proj".
        entries: its tensors, in the order in which `arrays` makes them.
        members: the leaves that the tensors are made from.
        compressed: paths of the float kernels that the scheme quantises.
        activation_scales: see `WeightSource`.

    >>> import numpy as np
    >>> source = WeightSource({"mlp": {"up_proj": {"kernel": np.ones((2, 2))}, "gate_proj": {"kernel": np.ones(2)}}})
    >>> source.bundles[0].key, [name for name, _ in source.bundles[0].arrays()]
    ('mlp.gate_proj+up_proj', ['mlp.gate_proj.kernel', 'mlp.up_proj.kernel'])
    """

    key: str
    entries: tuple[Entry, ...]
    members: tuple[LeafTensors, ...]
    compressed: frozenset[str] = frozenset()
    activation_scales: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the bundle."""
        return sum(entry.nbytes for entry in self.entries)

    def arrays(self, on_device: bool = False) -> Iterator[tuple[str, Any]]:
        """The tensors, by their names; quantised, packed and gathered one leaf at a time.

        Arguments:
            on_device: float leaves that are JAX arrays stay so, on their devices; otherwise all tensors are numpy
                arrays.
        """
        shared = self._shared_amax()
        for member in self.members:
            yield from with_scales(dict(self._made(member, shared, on_device)), self.activation_scales).items()

    def _made(self, member: LeafTensors, shared: float | None, on_device: bool) -> Iterator[tuple[str, Any]]:
        if member.path not in self.compressed:
            yield from member.make(on_device).items()
            return
        scheme, (weight,) = member.own_scheme, dataclasses.replace(member, dtype=None).make().values()
        assert scheme is not None  # WeightSource quantises only with a scheme
        largest = shared
        if scheme.has_tensor_scale and not scheme.shares_global_scale:
            largest = amax(weight)
        made = about(member.path, lambda: scheme.compress(weight, amax=largest))
        yield from ((f"{member.module}.{part}", tensor) for part, tensor in made.items())

    def _shared_amax(self) -> float | None:
        """The largest magnitude of all kernels, if the scheme scales them by one number."""
        kernels = [member for member in self.members if member.path in self.compressed]
        scheme = kernels[0].own_scheme if kernels else None
        if scheme is None or not (scheme.has_tensor_scale and scheme.shares_global_scale):
            return None
        return max(amax(kernel.on_host()) for kernel in kernels)


class WeightSource:
    """A tree's tensors, in the natural order of their bundles' names. They are made when they are asked for.

    Arguments:
        tree: an NNX module or state, Linen's variables or parameters, or any pytree of arrays: numpy arrays, or JAX
            arrays with any sharding within the process. Kernels may be QuantizedArrays [K, N].
        mapping: gives the tensors' names. None: the leaves' paths, for a QuantizedArray with `data`, `scale` and so on.
        scheme: the format of quantised kernels; needs a mapping. With a `schemes.mixed.Mixed` each module has the
            scheme of the target that names it, and kernels that no target names are not quantised.
        dtype: the dtype that float leaves are rounded to if they are not quantised. None: each keeps its own.
        activation_scales: static scales of activations by their tensors' names, in place of the scheme's, see
            `checkpoints.save`.
        kv_cache: the `KVCache` that the engine has. If its scales are static, the tree must have them. A tree that has
            them sends them in any case.
        quantize: which float kernels are quantised on the way, from their own dtype, as `jaxlowprec convert` does: all
            except those that these rules leave alone. None: only kernels that are quantised already are stored so.

    Attributes:
        manifest: describes the tensors. It is known at once; nothing is computed before `bundles` are asked for arrays.
        bundles: the tensors, in bundles that must arrive together.

    Raises:
        TypeError: leaves that are not arrays, such as Python's numbers, which have no dtype to be sent in; a mapping,
            scheme, dtype or rules that are something else.
        ValueError: static scales that `kv_cache` needs are missing; leaves that no rule matches; a scheme without a
            mapping, or one that cannot hold a kernel; a dtype that is not of floats; some projections of a fused matrix
            would be quantised and others not.

    >>> import numpy as np
    >>> source = WeightSource({"norm": {"scale": np.ones(4, np.float32)}, "bias": np.zeros(2, np.float32)})
    >>> [entry.name for entry in source.manifest.entries]
    ['bias', 'norm.scale']
    >>> dict(source.arrays())["norm.scale"]
    array([1., 1., 1., 1.], dtype=float32)
    """

    def __init__(
        self,
        tree: Any,
        mapping: TreeMapping | None = None,
        scheme: Scheme | None = None,
        dtype: Any = None,
        *,
        quantize: Rules | None = None,
        activation_scales: Mapping[str, np.ndarray] | None = None,
        kv_cache: KVCache | None = None,
    ):
        if mapping is None and (scheme is not None or quantize is not None):
            raise ValueError("WeightSource: scheme= and quantize= are about modules; pass mapping= to name them")
        if quantize is not None and scheme is None:
            raise ValueError("WeightSource: quantize= needs scheme=, the format to quantise to")
        _check_kinds(mapping, quantize)
        require_scheme("WeightSource", scheme)
        dtype = float_dtype_or_none("WeightSource", dtype)
        check_arrays("WeightSource", "the tree", tree)
        stored = _by_path(tree, dtype) if mapping is None else mapping.stored(tree, scheme, dtype)
        compressed = _compressed(stored, quantize)
        scales = activation_scales or {}
        check_scales("WeightSource", scales)
        bundled: dict[str, list[LeafTensors]] = {}
        for member in sorted(stored, key=lambda member: natural(member.name)):
            bundled.setdefault(bundle_of(member), []).append(member)
        self.bundles = tuple(
            Bundle(key, _entries(bundled[key], compressed, scales), tuple(bundled[key]), compressed, scales)
            for key in sorted(bundled, key=natural)
        )
        quantised = compressed or any(member.is_quantized for member in stored)
        self._scheme = scheme if quantised else None
        kernels = [member for member in stored if member.is_kernel and not member.is_quantized]
        self._ignore = [kernel.module for kernel in kernels if kernel.path not in compressed]
        self._ignore += [] if mapping is None else mapping.tied_modules
        self.manifest = Manifest(
            tuple(entry for bundle in self.bundles for entry in bundle.entries),
            None if self._scheme is None else described(self._scheme),
        )
        if kv_cache is not None:
            require_cache_scales("WeightSource", kv_cache, {e.name: e.shape for e in self.manifest.entries})

    def quantization_config(self) -> dict[str, Any] | None:
        """The entry of config.json for what is sent, as `checkpoints.save` writes it. None: neither weights nor a cache
        are quantised.

        It ignores every kernel that is not quantised, by name, a tied head included.
        """
        entry = None if self._scheme is None else self._scheme.quantization_config(self._ignore)
        return with_kv_cache("WeightSource", entry, self._scheme, {e.name: e.shape for e in self.manifest.entries})

    def arrays(self, on_device: bool = False) -> Iterator[tuple[str, Any]]:
        """All tensors in order, one at a time. See `Bundle.arrays`."""
        for bundle in self.bundles:
            yield from bundle.arrays(on_device)


def check_arrays(who: str, what: str, tree: Any) -> None:
    """Raises TypeError if a leaf of the tree has no shape and dtype.

    >>> check_arrays("example", "the tree", {"lr": 0.1})
    Traceback (most recent call last):
    TypeError: example: the tree has 0.1 at lr, a float; needs arrays, such as numpy.float32(...), which say their dtype
    """
    for path, leaf in leaves(tree).items():
        if not isinstance(leaf, QuantizedArray) and not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise TypeError(
                f"{who}: {what} has {brief(leaf)} at {path or 'its root'}, a {type(leaf).__name__}; needs arrays, such "
                "as numpy.float32(...), which say their dtype"
            )
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise TypeError(f"{who}: {what} has {leaf.dtype} at {path}; needs its numbers: jax.random.key_data(...)")


def natural(name: str) -> list[tuple[int, int, str]]:
    """A sort key for names, in which numbers are compared as numbers.

    >>> sorted(["layers.10", "layers.9", "embed"], key=natural)
    ['embed', 'layers.9', 'layers.10']
    """
    parts = re.split(r"([0-9]+)", name)
    digits = [part.lstrip("0") for part in parts]  # compared by length first: int() takes at most 4300 digits
    key = [(1, len(digits[i]), digits[i]) if i % 2 else (0, 0, part) for i, part in enumerate(parts)]
    return [*key, (-1, 0, name)]  # the name decides between 1 and 01


def bundle_of(member: LeafTensors) -> str:
    """The key of the bundle that a leaf's tensors belong to.

    >>> bundle_of(LeafTensors("layers.0.k_proj.kernel", "layers.0.k_proj.weight", None))
    'layers.0.q_proj+k_proj+v_proj'
    """
    module = member.module or member.name
    if isinstance(member, _Part):
        module = module.rpartition(".")[0] or module
    return next((unit.lstrip(".") for unit in fused_units(module) if "+" in unit), module)


class _Part(LeafTensors):
    """An array of a QuantizedArray."""


def _by_path(tree: Any, dtype: Any) -> list[LeafTensors]:
    stored: list[LeafTensors] = []
    for path, leaf in leaves(tree).items():
        if not isinstance(leaf, QuantizedArray):
            stored.append(LeafTensors(path, path, leaf, dtype=dtype if _is_float(leaf) else None))
            continue
        arrays = {part: getattr(leaf, part) for part in PARTS}
        stored += [_Part(f"{path}.{n}", f"{path}.{n}", a) for n, a in arrays.items() if a is not None]
    return stored


def _is_float(leaf: Any) -> bool:
    return leaf.dtype.name in FLOATS


def _check_kinds(mapping: Any, quantize: Any) -> None:
    given = (
        ("mapping", mapping, TreeMapping, "a TreeMapping, such as checkpoints.mapping_for(config) makes"),
        ("quantize", quantize, Rules, "Rules, which say what is left alone, such as Rules(defaults=DEFAULTS)"),
    )
    for name, value, kind, needs in given:
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"WeightSource: {name}={shown(value)}; needs {needs}")


def _compressed(stored: Sequence[LeafTensors], quantize: Rules | None) -> frozenset[str]:
    """Paths of the float kernels that are to be quantised."""
    kernels = {member.module: member for member in stored if member.is_kernel}
    if quantize is None:
        _require_one_scheme(kernels, ())
        return frozenset()
    chosen = {
        m: k
        for m, k in kernels.items()
        if not k.is_quantized and k.own_scheme is not None and quantize.why_left_alone(m) is None
    }
    _require_one_scheme(kernels, chosen)
    left = {m for m, k in kernels.items() if m not in chosen and not k.is_quantized}
    if pairs := splits(left, set(kernels) - left):
        alone, other = pairs[0]
        raise ValueError(
            f"WeightSource: {alone} would be left alone and {other} quantised, but engines hold them as one weight; "
            "let the rules match both or neither"
        )
    for module, kernel in chosen.items():
        own = kernel.own_scheme
        assert own is not None
        if reason := own.check(kernel.shape):
            raise ValueError(
                f"WeightSource: {own.name} cannot hold {module}: {reason}; leave it alone with "
                "quantize=Rules(ignore=...)"
            )
    return frozenset(kernel.path for kernel in chosen.values())


def _require_one_scheme(kernels: Mapping[str, LeafTensors], chosen: Collection[str]) -> None:
    """Raises ValueError if kernels that engines hold as one matrix would have different schemes."""
    owned = {module: kernel.own_scheme for module, kernel in kernels.items() if kernel.is_quantized or module in chosen}
    require_one_scheme_in_a_unit({module: scheme for module, scheme in owned.items() if scheme is not None})


def _entries(
    members: Sequence[LeafTensors], compressed: frozenset[str], scales: Mapping[str, np.ndarray]
) -> tuple[Entry, ...]:
    given = {name: TensorSpec(file_dtype(scale.dtype), scale.shape) for name, scale in scales.items()}
    found = []
    for member in members:
        specs: Mapping[str, TensorSpec] = about(member.path, dataclasses.replace(member, dtype=None).specs)
        if member.path in compressed:
            assert member.own_scheme is not None
            specs = output_specs(member.own_scheme, member.module, next(iter(specs.values())))
        else:
            specs = member.specs()
        found += [Entry(name, spec.dtype, spec.shape) for name, spec in with_scales(specs, given).items()]
    return tuple(found)
