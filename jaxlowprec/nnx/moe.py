"""The mixture-of-experts block of NNX."""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxlowprec.arguments import a_text
from jaxlowprec.layers.fused_mlp_product import Saved
from jaxlowprec.moe.grouped_linear import common_inputs, fused_experts, hidden_activation
from jaxlowprec.moe.mixture import Exchange, Groups, MoEAux, Settings, check_block, mixture
from jaxlowprec.moe.router import RouterConfig
from jaxlowprec.nnx import grouped
from jaxlowprec.nnx.layers import Linear
from jaxlowprec.recipes.autocast import FROM_CONTEXT

_default_init = nnx.initializers.lecun_normal()
_ROUTING = RouterConfig()


class SelectionBias(nnx.Variable):
    """The bias that a block's router adds to the scores when it chooses experts: float32 [experts].

    It is not an `nnx.Param`: optimizers and `nnx.grad` leave it out. `jaxlowprec.moe.update_selection_bias` moves it.
    """


class Experts(nnx.Module):
    """An expert: the activation of gate_proj and up_proj, or of up_proj, then down_proj.

    Its layers are `Linear`s (shared experts, over tokens) or `GroupedLinear`s (over rows sorted by expert).
    """

    def __init__(self, make: Any, sizes: tuple[int, int], activation: Any, gated: Any, saved: Saved, inits: Any):
        features, hidden = sizes
        self.activation, self.gated, self.saved = activation, gated, saved
        self.gate_proj = nnx.data(make(features, hidden, inits[0], "gate_proj") if gated else None)
        self.up_proj = make(features, hidden, inits[0], "up_proj")
        self.down_proj = make(hidden, features, inits[1], "down_proj")

    def __call__(self, x: Array, *groups: Groups) -> Any:
        """Tokens [..., features] to outputs of that shape; with `groups`, what they make of tokens [T, features]."""
        if not groups:
            return self._separate(x)
        layers = [*self._hidden, self.down_proj]
        if all(type(layer) is grouped.GroupedLinear for layer in layers):
            inputs = common_inputs(x, [layer.promoted for layer in layers], self._activated, self.down_proj.in_features)
            if inputs is not None:
                given = [layer.arguments(inputs) for layer in layers]
                options: Any = {"layers": given, "activation": self._activated, "saved": self.saved}
                return groups[0].run(functools.partial(fused_experts, "MoE", **options), inputs, given)
        return groups[0].run(self._separate, x)

    def _separate(self, x: Array, *group_sizes: Array) -> Array:
        """The layers one after the other."""
        hidden = [layer(x, *group_sizes) for layer in self._hidden]
        return self.down_proj(self._activated(*hidden), *group_sizes)

    @property
    def _hidden(self) -> list[Any]:
        """The layers before down_proj."""
        return [layer for layer in (self.gate_proj, self.up_proj) if layer is not None]

    @property
    def _activated(self) -> Any:
        """The activation of the results of these."""
        return hidden_activation(self.activation, self.gated)


class MoE(nnx.Module):
    """A block of experts under a recipe: each token goes to top_k of them; no token is dropped, and nothing is padded.

    Its parts are `router`, which is computed in float32 whatever the recipe, `experts` (`gate_proj`, `up_proj`,
    `down_proj`), and optionally `shared_experts`, with the same three layers.

    Arguments:
        num_experts, in_features, hidden_features: sizes; outputs have in_features, too.
        top_k: experts per token.
        shared_hidden_features: hidden size of the shared experts, which process every token; 0: there are none.
        activation, gated: an expert is down(activation(gate(x)) * up(x)); with gated="joint" down(activation(gate(x),
            up(x))); ungated down(activation(up(x))).
        use_bias: whether the layers of experts and of shared experts have biases.
        routing: how tokens choose experts, whether the router has a bias, and the coefficients of its losses. With
            `selection_bias=True` the block has one, float32 [num_experts], a `SelectionBias`, which is not a parameter.
        exchange: where experts are on other devices, how tokens get there and back. None: all experts are here.
        fsdp_axis: the mesh axis in shard_map along which the first features of the experts' kernels are split, see
            `GroupedLinear`. Other kernels are whole.
        saved: "quantized", "8bit" or "recompute": what is kept of the experts' hidden layer for the backward pass, see
            `jaxlowprec.grouped_mlp`. An activation with arrays of its own, or that gives another dtype, keeps it all.
        dtype, param_dtype, precision, kernel_init: see `GroupedLinear`.
        down_kernel_init, router_kernel_init: initialisers of these kernels. `shared_kernel_init` and
            `shared_down_kernel_init` are for the shared experts' kernels, which have no axis of experts.
        recipe, name: see `Linear`; the parts are named name/experts/up_proj and so on.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> from flax import nnx
    >>> moe = jlp.nnx.MoE(4, 64, 128, top_k=2, rngs=nnx.Rngs(0))
    >>> with jlp.autocast(jlp.MXFP8BlockScaling()):
    ...     y, aux = moe(jnp.ones((2, 8, 64)))
    ...     replayed, _ = moe(jnp.ones((2, 8, 64)), tape=aux.tape)
    >>> y.shape, aux.tape.shape, int(aux.group_sizes.sum()), bool((y == replayed).all())
    ((2, 8, 64), (2, 8, 2), 32, True)
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        hidden_features: int,
        *,
        top_k: int,
        shared_hidden_features: int = 0,
        activation: Any = jax.nn.silu,
        gated: bool | Literal["joint"] = True,
        use_bias: bool = False,
        routing: RouterConfig = _ROUTING,
        exchange: Exchange | None = None,
        fsdp_axis: Any = None,
        saved: Saved = "quantized",
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: Any = grouped.default_kernel_init,
        down_kernel_init: Any = None,
        router_kernel_init: Any = _default_init,
        shared_kernel_init: Any = _default_init,
        shared_down_kernel_init: Any = None,
        recipe: Any = FROM_CONTEXT,
        name: str = "",
        rngs: nnx.Rngs,
    ):
        self.settings = Settings(num_experts, top_k, routing, exchange)
        check_block(type(self).__name__, self.settings, gated, saved, use_bias=use_bias)
        a_text(type(self).__name__, name=name)
        common = {"use_bias": use_bias, "dtype": dtype, "param_dtype": param_dtype, "precision": precision}
        common |= {"recipe": recipe, "rngs": rngs}

        def named(part: str) -> str:
            return f"{name}/{part}" if name else ""

        def expert(inputs: int, outputs: int, init: Any, part: str) -> grouped.GroupedLinear:
            whole = named(f"experts/{part}")
            own: Any = {"kernel_init": init, "name": whole, "fsdp_axis": fsdp_axis}
            return grouped.GroupedLinear(num_experts, inputs, outputs, **own, **common)

        def shared(inputs: int, outputs: int, init: Any, part: str) -> Linear:
            return Linear(inputs, outputs, kernel_init=init, name=named(f"shared_experts/{part}"), **common)

        self.router = Linear(
            in_features,
            num_experts,
            use_bias=routing.logit_bias,
            dtype=jnp.float32,
            precision=jax.lax.Precision.HIGHEST,
            kernel_init=router_kernel_init,
            recipe=None,
            name=named("router"),
            rngs=rngs,
        )
        self.selection_bias = nnx.data(
            SelectionBias(jnp.zeros(num_experts, jnp.float32)) if routing.selection_bias else None
        )
        inits = kernel_init, down_kernel_init or kernel_init
        self.experts = Experts(expert, (in_features, hidden_features), activation, gated, saved, inits)
        self.shared_experts = nnx.data(None)
        if shared_hidden_features:
            inits = shared_kernel_init, shared_down_kernel_init or shared_kernel_init
            sizes = in_features, shared_hidden_features
            self.shared_experts = Experts(shared, sizes, activation, gated, saved, inits)

    def __call__(
        self, x: Float[Array, "*T D"], tape: Int[Array, "*T k"] | None = None
    ) -> tuple[Float[Array, "*T D"], MoEAux]:
        """Tokens [..., in_features] to outputs of the same shape, and a `MoEAux`.

        `tape`: [..., top_k], the experts to send tokens to, such as `aux.tape` of another pass; a row of -1 chooses
        afresh. Only the choice is frozen: weights are recomputed, and gradients flow. See `jaxlowprec.moe.route`.
        """
        bias = None if self.selection_bias is None else self.selection_bias.get_value()
        parts = self.router, self.experts, self.shared_experts
        return mixture(type(self).__name__, x, tape, self.settings, *parts, bias=bias)
