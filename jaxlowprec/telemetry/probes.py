"""How statistics leave a training step: as the gradient of a state that the layers read.

The state is zeros; its gradient is what was measured. So numbers of the backward pass come out, too, and each use of a
layer under `scan`, `remat` and `vmap` is counted once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec.arguments import shown
from jaxlowprec.ops.statistics.finish import LENGTH
from jaxlowprec.recipes.roles import GEMMS, Recipe, Roles
from jaxlowprec.telemetry.measures import Statistics, of_gemm
from jaxlowprec.telemetry.sampling import CODES
from jaxlowprec.telemetry.scopes import Scope, current, entered

TENSORS = (
    "input rowwise",
    "input columnwise",
    "weight rowwise",
    "weight columnwise",
    "gradient rowwise",
    "gradient columnwise",
)
"""The quantised operands of a layer, in the order of its state: fprop reads the input rowwise and the weight
columnwise, dgrad the gradient and the weight rowwise, wgrad the input and the gradient columnwise."""

AS_TRAINED = "as trained"
"""The key of what the model trains by, beside the labels of `what_if=`."""

GEMM_ERRORS = "errors of GEMMs"
"""The key of the errors of the layer's three GEMMs, float32 [3, 2]: uses, and relative square errors."""

WEIGHT_CODES = "codes of the weight"
"""The key of the weight's codes, float32 [1 + CODES]: uses, and a sample of codes."""

State = dict[str, dict[str, jax.Array]]


@functools.partial(jax.tree_util.register_dataclass, data_fields=("on", "state"), meta_fields=("what_if",))
@dataclasses.dataclass(frozen=True)
class Probe:
    """The arguments by which a layer's product is measured.

    Attributes:
        on: bool: whether this step is measured.
        state: by label, float32 [len(TENSORS), LENGTH], and what is sampled; its gradient is what was measured.
        what_if: labels and roles that the tensors are also quantised by, to be measured.
    """

    on: Any
    state: Any
    what_if: tuple[tuple[str, Roles], ...] = ()

    def gradient(self, found: dict[str, jax.Array]) -> Probe:
        """The cotangent that brings what was found to the state."""
        return Probe(None, found, self.what_if)


class _Collector(Scope):
    """A `collecting` block, or the search for the names of layers.

    Attributes:
        state: what was given; None while names are looked for.
        on: whether this step is measured.
        what_if: recipes by label.
        shapes: the states' shapes by label, of the layers that were called.
    """

    def __init__(self, state: Mapping[str, Any] | None, on: Any = True, what_if: Mapping[str, Recipe] | None = None):
        self.state, self.on, self.what_if = state, on, what_if or {}
        self.shapes: dict[str, dict[str, tuple[int, ...]]] = {}

    def probe(self, who: str, name: str, module_type: str) -> Probe | None:
        """The probe of the layer of that name; None while names are looked for."""
        recipes = {label: recipe.at(name) for label, recipe in self.what_if.items()}
        what_if = tuple((label, r.roles(module_type, name)) for label, r in recipes.items() if r is not None)
        sizes: dict[str, tuple[int, ...]] = {GEMM_ERRORS: (len(GEMMS), 2), WEIGHT_CODES: (1 + CODES,)}
        sizes = {label: (len(TENSORS), LENGTH) for label in (AS_TRAINED, *(label for label, _ in what_if))} | sizes
        shapes = {label: (*self.stack, *size) for label, size in sizes.items()}
        if self.state is None:
            if self.shapes.setdefault(name, shapes) != shapes:
                raise ValueError(
                    f"{who}: layers named {name!r} are called within stacks of different sizes, or within one and "
                    "without; give them different names"
                )
            return None
        leaves: Any = self.state.get(name)
        given = None
        if isinstance(leaves, Mapping):
            given = {label: jnp.shape(leaf) for label, leaf in leaves.items()}
        if given != shapes:
            has = f"has {list(self.state)[:8]}" if given is None else f"has {given} for it"
            raise ValueError(
                f"{who}: layer {name!r} needs telemetry of shapes {shapes}, and the state {has}; make it by "
                "jaxlowprec.telemetry.init for this function, these arguments, this recipe and the same what_if="
            )
        return Probe(self.on, {label: self.placed(leaf) for label, leaf in leaves.items()}, what_if)


@contextlib.contextmanager
def collecting(
    state: Mapping[str, Any], *, on: Any = True, what_if: Mapping[str, Recipe] | None = None
) -> Iterator[None]:
    """Within the block, layers that follow a recipe measure what it does: the gradient of `state` is what they found.

    For functions that are differentiated within `jax.jit`; `value_and_grad` does both. Calls that are not
    differentiated measure nothing.

    Arguments:
        state: of `init`.
        on: bool, traced or not: whether this step is measured, such as `step % 100 == 0`.
        what_if: recipes by label. The same tensors are quantised by them, too, and measured; the model does not train
            by them. Rounding is to nearest, and amaxes are the tensors' own.

    Raises:
        TypeError: the state is not a mapping, `on` is no bool, or a recipe is not a recipe.
        ValueError: within the block: the state does not fit a layer.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> def loss(w, x, state):
    ...     with jlp.telemetry.collecting(state):
    ...         return jlp.linear(x, w, recipe=jlp.MXFP8BlockScaling(), name="up").sum()
    >>> x, w = jnp.ones((32, 64)), jnp.ones((64, 32))
    >>> state = jlp.telemetry.init(loss, w, x, {})
    >>> found = jax.jit(jax.grad(loss, argnums=2))(w, x, state)
    >>> round(float(jlp.telemetry.read(found)["up"]["weight columnwise"].amax))
    1
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"telemetry.collecting: state={shown(state)}; needs what jaxlowprec.telemetry.init makes")
    _check_recipes("telemetry.collecting", what_if)
    if not isinstance(on, bool) and (getattr(on, "shape", None) != () or str(getattr(on, "dtype", "")) != "bool"):
        raise TypeError(f"telemetry.collecting: on={shown(on)}; needs a bool or an array [] of bool")
    here = current()
    searching = here is not None and not (isinstance(here, _Collector) and here.state is not None)
    with contextlib.nullcontext() if searching else entered(_Collector(state, on, what_if)):
        yield


def _check_recipes(who: str, what_if: Any) -> None:
    """Raises TypeError unless the argument maps labels to recipes, and ValueError if it has a label of ours."""
    if what_if is not None and not (
        isinstance(what_if, Mapping)
        and all(isinstance(label, str) and isinstance(recipe, Recipe) for label, recipe in what_if.items())
    ):
        raise TypeError(
            f"{who}: what_if={shown(what_if)}; needs recipes by label, such as {{'mxfp8': MXFP8BlockScaling()}}"
        )
    if taken := {AS_TRAINED, GEMM_ERRORS, WEIGHT_CODES} & set(what_if or ()):
        raise ValueError(
            f"{who}: what_if= has the label {taken.pop()!r}, which telemetry uses itself; give another one"
        )


def init(function: Callable[..., Any], *args: Any, what_if: Mapping[str, Recipe] | None = None, **kwargs: Any) -> State:
    """The state for `collecting`: zeros for each layer that follows a recipe when the function is called so.

    The function is traced, not run; it may contain the `collecting` block, of any state.

    Arguments:
        what_if: see `collecting`.
        args, kwargs: the function's.

    Returns:
        float32 arrays by layer and label; with a leading axis for layers within `stacked`.
    """
    if not callable(function):
        raise TypeError(f"telemetry.init: function={shown(function)}; needs a function")
    _check_recipes("telemetry.init", what_if)
    search = _Collector(None, what_if=what_if)
    with entered(search):
        jax.eval_shape(lambda *args, **kwargs: (function(*args, **kwargs), None)[1], *args, **kwargs)
    return jax.tree.map(
        lambda shape: jnp.zeros(shape, jnp.float32), search.shapes, is_leaf=lambda found: isinstance(found, tuple)
    )


def value_and_grad(
    function: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    on: Any = True,
    what_if: Mapping[str, Recipe] | None = None,
) -> Callable[..., Any]:
    """`jax.value_and_grad` of a function that returns what its layers measured, too: `((value, gradient), found)`.

    For use within `jax.jit`. `found` is what `read` and `Recorder` take.

    Arguments:
        function, argnums, has_aux: see `jax.value_and_grad`.
        on, what_if: see `collecting`.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> def loss(w, x):
    ...     return jlp.linear(x, w, recipe=jlp.NVFP4BlockScaling(), name="up").sum()
    >>> @jax.jit
    ... def step(w, x, number):
    ...     (value, gradient), found = jlp.telemetry.value_and_grad(loss, on=number % 10 == 0)(w, x)
    ...     return w - 0.1 * gradient, found
    >>> w, found = step(jnp.ones((64, 32)), jnp.ones((32, 64)), 20)
    >>> float(jlp.telemetry.read(found)["up"]["input rowwise"].sqnr)
    inf
    """
    several = argnums if isinstance(argnums, tuple) else (argnums,)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        state = init(function, *args, what_if=what_if, **kwargs)

        def collected(chosen: tuple[Any, ...], state: State) -> Any:
            given = list(args)
            for place, value in zip(several, chosen, strict=True):
                given[place] = value
            with collecting(state, on=on, what_if=what_if):
                return function(*given, **kwargs)

        chosen = tuple(args[place] for place in several)
        value, (gradients, found) = jax.value_and_grad(collected, argnums=(0, 1), has_aux=has_aux)(chosen, state)
        return (value, gradients if isinstance(argnums, tuple) else gradients[0]), found

    return call


def read(found: Mapping[str, Any]) -> dict[str, dict[str, Statistics]]:
    """The measurements on the host, by layer and tensor (see `TENSORS`), without those that no layer made.

    Beside its tensors a layer has its GEMMs, `fprop`, `dgrad` and `wgrad`: of their `Statistics` only `square_error`,
    `relative_error` and `sqnr` are known, and the others are NaN. They compare a sample of the result, the product of
    16 lines of each operand, with the product of the same lines in high precision. Within `jax.shard_map` each device
    takes lines of its own part.

    A layer of a stack has its index behind its name: `blocks/up[3]`. What `what_if=` asked for has the label behind the
    tensor's name: `gradient rowwise, mxfp8`.
    """
    if not isinstance(found, Mapping):
        raise TypeError(f"telemetry.read: found={shown(found)}; needs the gradient of a telemetry state")
    for name, by_label in found.items():
        if not isinstance(by_label, Mapping):
            raise TypeError(f"telemetry.read: found has {shown(by_label)} at {shown(name)}; needs statistics by label")
    by_layer: dict[str, dict[str, Statistics]] = {}
    for name, by_label in jax.device_get(dict(found)).items():
        for label, values in by_label.items():
            if label == WEIGHT_CODES:
                continue
            behind = "" if label in (AS_TRAINED, GEMM_ERRORS) else f", {label}"
            for layer, rows in _layers(name, values, 2):
                names = GEMMS if label == GEMM_ERRORS else TENSORS
                made = of_gemm if label == GEMM_ERRORS else Statistics
                seen = {f"{n}{behind}": made(row) for n, row in zip(names, rows, strict=True) if row[0] > 0}
                if seen:
                    by_layer.setdefault(layer, {}).update(seen)
    return by_layer


def weight_codes(found: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """A sample of the codes of each layer's weight, as far as it was measured; see `sampling.codes`."""
    by_layer: dict[str, np.ndarray] = {}
    for name, by_label in found.items():
        if WEIGHT_CODES in by_label:
            values = jax.device_get(by_label[WEIGHT_CODES])
            by_layer |= {layer: row[1:] / row[0] for layer, row in _layers(name, values, 1) if row[0] > 0}
    return by_layer


def _layers(name: str, values: np.ndarray, ndim: int) -> Iterator[tuple[str, np.ndarray]]:
    """The name and values of a layer, or of each layer of a stack."""
    if values.ndim == ndim:
        yield name, values
    else:
        yield from ((f"{name}[{i}]", each) for i, each in enumerate(values))


# --- for the layers


def probe(who: str, name: str, module_type: str = "linear") -> Probe | None:
    """The probe of the layer of that name; None if it is not measured. `module_type`: see `Recipe.roles`."""
    here = current()
    return here.probe(who, name, module_type) if isinstance(here, _Collector) else None
