"""The model over many devices: what the axes of a mesh split, and where arrays are placed.

The model names the axes of its parameters and activations by their meaning ("embed", "heads"); RULES says which axis of
the mesh splits each of them.

| axis | splits |
|---|---|
| data | the batch |
| fsdp | the batch; parameters and optimizer state along the width, gathered for each product |
| tensor | attention heads, the MLP's hidden width and the logits: qkv and up by columns, out and down by rows |
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core.spmd import get_logical_axis_rules, get_pspec
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp", "tensor")
RULES = (
    ("batch", ("data", "fsdp")),
    ("embed", "fsdp"),
    ("heads", "tensor"),
    ("mlp", "tensor"),
    ("vocabulary", "tensor"),
)


def partitioned(init: Callable, *axes: str | None) -> Callable:
    """An initialiser that attaches the names of its axes to a parameter. It places nothing: the model needs no mesh."""
    return nnx.with_partitioning(init, axes, eager_sharding=False)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Splits an activation as the rules in force say for its axes; without rules (without a mesh) returns x."""
    return jax.lax.with_sharding_constraint(x, get_pspec(axes)) if get_logical_axis_rules() else x


def parse(text: str) -> dict[str, int]:
    """The sizes in text such as "data=2,fsdp=2,tensor=2"; axes that are left out have size 1.

    Raises:
        ValueError: the axis does not exist, or its size is not a positive integer.
    """
    sizes = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in AXES or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"--mesh {text}: {part!r} is none of data=N, fsdp=N, tensor=N with N of 1 or more")
        sizes[axis] = int(size)
    return sizes


def check(sizes: dict[str, int], config: Any, batch: int, sequence_parallel: bool) -> None:
    """Raises ValueError if a mesh does not divide the batch or the model."""
    tensor, parts = sizes["tensor"], sizes["data"] * sizes["fsdp"]
    needs = [
        (batch % parts, f"--batch {batch} is not a multiple of data * fsdp = {parts}"),
        (config.width % sizes["fsdp"], f"the width {config.width} is not a multiple of fsdp = {sizes['fsdp']}"),
        (config.heads % tensor, f"{config.heads} heads are not a multiple of tensor = {tensor}"),
        (config.width % tensor, f"the width {config.width} is not a multiple of tensor = {tensor}"),
        (
            sequence_parallel and config.context % tensor,
            f"--sequence-parallel: the context {config.context} is not a multiple of tensor = {tensor}",
        ),
    ]
    for remainder, message in needs:
        if remainder:
            raise ValueError(f"--mesh: {message}; choose sizes that divide")


def make_mesh(sizes: dict[str, int]) -> Mesh:
    """A mesh of the first devices; with several processes, of all devices.

    Raises:
        ValueError: there are fewer devices, or several processes have more.
    """
    needed, devices = math.prod(sizes.values()), jax.devices()
    given = f"--mesh {','.join(f'{a}={n}' for a, n in sizes.items())}: needs {needed} devices"
    if needed > len(devices):
        raise ValueError(f"{given}, there are {len(devices)} of {jax.default_backend()}")
    if jax.process_count() > 1 and needed < len(devices):
        raise ValueError(f"{given}, and {jax.process_count()} processes have {len(devices)}: sizes must use them all")
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices[:needed])


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a run's arrays are placed.

    Attributes:
        mesh: the mesh; None for a single device.
        sequence_parallel: whether "tensor" splits activations along time between the blocks' products.
    """

    mesh: Mesh | None = None
    sequence_parallel: bool = False

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """A context in which `constrain` and the names of parameters' axes refer to this mesh."""
        if self.mesh is None:
            yield
            return
        rules = (*RULES, ("time", "tensor" if self.sequence_parallel else None))
        with jax.set_mesh(self.mesh), nnx.logical_axis_rules(rules):
            yield

    def shardings(self, tree: Any) -> Any:
        """The shardings of a tree of variables, by their axes' names; arrays without names are on every device."""
        return None if self.mesh is None else nnx.get_named_sharding(tree, self.mesh)

    def replicated(self) -> Any:
        """The sharding of arrays that every device holds."""
        return None if self.mesh is None else NamedSharding(self.mesh, P())

    def create(self, function: Callable, *args: Any) -> Any:
        """The result of a function of arrays, with each part made on its own device."""
        if self.mesh is None:
            return function(*args)
        return jax.jit(function, out_shardings=self.shardings(jax.eval_shape(function, *args)))(*args)

    def _batches(self) -> NamedSharding:
        return NamedSharding(self.mesh, P(("data", "fsdp")))

    def rows(self, batch: int) -> np.ndarray:
        """The rows of a batch that this process loads."""
        if self.mesh is None:
            return np.arange(batch)
        parts = self._batches().addressable_devices_indices_map((batch,)).values()
        return np.unique(np.concatenate([np.arange(batch)[part] for part in parts]))

    def place(self, rows: np.ndarray, batch: int) -> Any:
        """The whole batch from the rows that each process loaded."""
        if self.mesh is None:
            return rows
        return jax.make_array_from_process_local_data(self._batches(), rows, (batch, *rows.shape[1:]))

    def in_any_process(self, flag: bool) -> bool:
        """Whether the flag is set in any process: all processes call this, and all get the same answer."""
        if self.mesh is None or jax.process_count() == 1:
            return flag
        over_all, devices = NamedSharding(self.mesh, P(AXES)), self.mesh.devices.size
        flags = jax.make_array_from_callback((devices,), over_all, lambda part: np.full(devices, flag)[part])
        return bool(_any(self.replicated())(flags))


@functools.cache
def _any(replicated: NamedSharding) -> Callable:
    return jax.jit(jnp.any, out_shardings=replicated)


ONE_DEVICE = Layout()
