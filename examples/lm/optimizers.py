"""The optimizers of the examples, and how they keep their states between steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import GetAttrKey

import jaxlowprec as jlp

if TYPE_CHECKING:
    from lm.training import Schedule

B2 = 0.95
MUONS_RATE = 10  # times that of AdamW
BLOCK = 128  # of linear_int8
OPTIMIZERS = ("adamw", "muon")


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """AdamW, or Muon for matrices and Adam for the rest.

    Attributes:
        name: "adamw" or "muon".
        b2: the decay of second moments.
        states: how states and weights are kept, one of STATES.
    """

    name: str = "adamw"
    b2: float = B2
    states: str = "float32"

    def transformation(self, schedule: Schedule) -> optax.GradientTransformation:
        """Linear warm-up over a tenth of the steps (40 at most), cosine decay to a tenth, clipping at norm 1.

        AdamW is optax's where states are float32, and else `jlp.optim.adamw`, which updates codes in one pass.
        The amax histories of delayed scaling, if a recipe has them, are not touched by any of this.
        """
        rate = optax.warmup_cosine_decay_schedule(
            0.0,
            schedule.learning_rate,
            min(40, max(1, schedule.steps // 10)),
            max(schedule.steps, 2),
            schedule.learning_rate / 10,
        )
        if self.name == "adamw":
            adamw = optax.adamw if self.states == "float32" else jlp.optim.adamw
            inner = adamw(rate, b1=0.9, b2=self.b2, weight_decay=0.1)
        else:
            inner = optax.contrib.muon(
                lambda step: MUONS_RATE * rate(step), weight_decay=0.01, adam_b2=self.b2, adam_learning_rate=rate
            )
        clipped = optax.chain(optax.clip_by_global_norm(1.0), STATES[self.states](inner))
        return jlp.delayed_scaling.overwrite_with_gradient(clipped)

    def start(self, schedule: Schedule, parameters: Any) -> tuple[Any, Any]:
        """Parameters and the state of the first step, from float32 parameters, of which no bit is lost."""
        plain, target = dataclasses.replace(self, states="float32"), self.transformation(schedule)
        source = plain.transformation(schedule)
        like = jax.tree_util.tree_map_with_path(self._described, parameters)
        return jlp.optim.convert_state(source.init(parameters), parameters, source=source, target=target, like=like)

    def _described(self, path: Any, p: jax.Array) -> jax.ShapeDtypeStruct:
        """A parameter as it is kept: matrices beside master weights in bfloat16."""
        half = "masters" in self.states and p.ndim > 1 and not jlp.delayed_scaling.is_state(path)
        return jax.ShapeDtypeStruct(p.shape, jnp.bfloat16 if half else p.dtype)


def nearest(adamw: optax.GradientTransformation) -> optax.GradientTransformation:
    """AdamW whose states are rounded to nearest: with a slow decay second moments stand still, which is a fault."""
    codes = {name: jlp.optim.RelativeCode(signed=name == "mu", rounding="nearest") for name in ("mu", "nu")}
    return jlp.optim.quantized_state(adamw, {f"ScaleByAdamState.{name}": code for name, code in codes.items()})


def linear_int8(adamw: optax.GradientTransformation) -> optax.GradientTransformation:
    """AdamW whose moments are rounded to 127 or 255 equal steps of the largest of 128 neighbours, which is a fault.

    Second moments below half a step become 0, and their updates the first moment by epsilon.
    """

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = adamw.update(gradients, state, params)
        return updates, jax.tree_util.tree_map_with_path(rounded, state)

    def rounded(path: Any, x: jax.Array) -> jax.Array:
        levels = [{"mu": 127, "nu": 255}.get(key.name) for key in path if isinstance(key, GetAttrKey)]
        top = next(filter(None, levels), None)
        if top is None or x.ndim < 2 or x.size < 4096:
            return x
        blocks = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % BLOCK)])
        blocks = blocks.reshape(*x.shape[:-1], -1, BLOCK)
        step = jnp.maximum(jnp.abs(blocks).max(-1, keepdims=True), 1e-30) / top
        return (jnp.round(blocks / step) * step).reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]

    return optax.GradientTransformation(adamw.init, update)


def _with_masters(bits: int) -> Callable[[Any], Any]:
    return lambda inner: jlp.optim.master_weights(jlp.optim.quantized_state(inner), bits=bits)


STATES: dict[str, Callable[[Any], Any]] = {
    "float32": lambda inner: inner,
    "8-bit": jlp.optim.quantized_state,
    **{f"8-bit-masters-{bits}": _with_masters(bits) for bits in (32, 24, 16)},
    "8-bit-nearest": nearest,
    "linear-int8": linear_int8,
}
"""What wraps an optimizer: float32 states, those of 8 bits, and two faults that a study has to find."""
FAULTS = ("8-bit-nearest", "linear-int8")
"""Those of AdamW that train otherwise than float32 states."""
