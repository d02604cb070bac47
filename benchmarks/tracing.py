"""Time to trace and to compile the gradient of models under a recipe, as multiples of the plain models' times.

    python benchmarks/tracing.py [MODEL ...] [--layers 24] [--rounds 5] [--recipe nvfp4 --profile trace] [--save [NAME]]

A model is made once as it is and once quantised by the documented line: here in plain JAX, Flax and Equinox, and those
of trainer_models.py. Both sides run in turn with cleared caches, and times are the processor's for this process: other
processes do not count. Python's garbage collections walk only over what a side makes. Trainers' models are measured by
name alone; a model whose package is not installed is left out.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import gc
import importlib.util
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import timing
import trainer_models
from flax import linen as nn
from flax import nnx
from trainer_models import Side, transformed

import jaxlowprec as jlp

RECIPES = {"nvfp4": jlp.NVFP4BlockScaling(), "mxfp8": jlp.MXFP8BlockScaling()}
WIDTH, HIDDEN, HEADS, TOKENS, EXPERTS = 128, 256, 4, 64, 4
CALLS = 5
SHAPES = {name: (WIDTH, WIDTH) for name in ("query", "key", "value", "out")}
SHAPES |= {name: (WIDTH, HIDDEN) for name in ("gate", "up")} | {"down": (HIDDEN, WIDTH)}

Product = Callable[[str, jax.Array], jax.Array]
"""(the name of a linear layer, x [T, K]) -> [T, N]."""
X = jnp.zeros((TOKENS, WIDTH), jnp.bfloat16)


def normed(x: jax.Array) -> jax.Array:
    """x divided by the root mean square of its rows."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def attention(x: jax.Array, product: Product) -> jax.Array:
    """Causal attention and its residual."""
    h = normed(x)
    query, key, value = (product(name, h).reshape(TOKENS, HEADS, -1) for name in ("query", "key", "value"))
    scores = jnp.einsum("thd,shd->hts", query, key) / (WIDTH // HEADS) ** 0.5
    weights = jax.nn.softmax(jnp.where(jnp.tri(TOKENS, dtype=bool), scores, -1e9))
    return x + product("out", jnp.einsum("hts,shd->thd", weights, value).reshape(TOKENS, WIDTH))


def block(x: jax.Array, product: Product) -> jax.Array:
    """A layer of a Llama model without positions: seven products by parameters."""
    x = attention(x, product)
    h = normed(x)
    return x + product("down", jax.nn.silu(product("gate", h)) * product("up", h))


def squares(y: jax.Array) -> jax.Array:
    """The loss of an output."""
    return jnp.square(y.astype(jnp.float32)).mean()


def by(weights: dict[str, jax.Array]) -> Product:
    """Products in plain JAX."""
    return lambda name, x: x @ weights[name].astype(x.dtype)


def zeros(shapes: dict[str, tuple[int, ...]], *stack: int) -> dict[str, jax.Array]:
    """Parameters of these shapes, perhaps stacked: values do not matter to compilers."""
    return {name: jnp.zeros((*stack, *shape)) for name, shape in shapes.items()}


def plain(layers: int, recipe: Any) -> Side:
    """Unrolled layers in plain JAX."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for weights in params.values():
            x = block(x, by(weights))
        return squares(x)

    return transformed(loss, recipe), {f"layer_{i}": zeros(SHAPES) for i in range(layers)}, X


def scanned(layers: int, recipe: Any) -> Side:
    """The same layers in a scan, the first and the last in high precision."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return squares(jax.lax.scan(lambda x, weights: (block(x, by(weights)), None), x, params["layers"])[0])

    rules = recipe and jlp.PerLayer.keep_ends(recipe, first=1, last=1, block="layers")
    return transformed(loss, rules), {"layers": zeros(SHAPES, layers)}, X


def lstm(layers: int, recipe: Any) -> Side:
    """Stacked LSTMs, a sixth as many as layers of other models: a scan over time for each."""

    def cell(weights: Any, carry: Any, x: jax.Array) -> Any:
        h, c = carry
        i, f, g, o = jnp.split(by(weights)("inputs", x) + by(weights)("state", h), 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    def loss(params: Any, x: jax.Array) -> jax.Array:
        x = x.reshape(TOKENS // 16, 16, WIDTH)  # [time, batch, features]
        for weights in params.values():
            _, x = jax.lax.scan(functools.partial(cell, weights), (jnp.zeros_like(x[0]),) * 2, x)
        return squares(x)

    shapes = {name: (WIDTH, 4 * WIDTH) for name in ("inputs", "state")}
    return transformed(loss, recipe), {f"lstm_{i}": zeros(shapes) for i in range(max(layers // 6, 1))}, X


def experts(layers: int, recipe: Any) -> Side:
    """Unrolled layers of attention and experts, of which each token takes one."""

    def layer(x: jax.Array, weights: Any) -> jax.Array:
        x = attention(x, by(weights))
        h = normed(x)
        chosen = jnp.argmax(by(weights)("router", h), -1)
        order, sizes = jnp.argsort(chosen), jnp.bincount(chosen, length=EXPERTS)
        rows = h[order]
        gate, up = (jax.lax.ragged_dot(rows, weights[name].astype(x.dtype), sizes) for name in ("gate", "up"))
        return x.at[order].add(jax.lax.ragged_dot(jax.nn.silu(gate) * up, weights["down"].astype(x.dtype), sizes))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for weights in params.values():
            x = layer(x, weights)
        return squares(x)

    shapes = {name: (EXPERTS, *shape) if name in ("gate", "up", "down") else shape for name, shape in SHAPES.items()}
    shapes |= {"router": (WIDTH, EXPERTS)}
    return transformed(loss, recipe), {f"layer_{i}": zeros(shapes) for i in range(layers)}, X


class NNXBlock(nnx.Module):
    """The layer in Flax NNX."""

    def __init__(self, rngs: nnx.Rngs):
        for name, (k, n) in SHAPES.items():
            setattr(self, name, nnx.Linear(k, n, use_bias=False, dtype=jnp.bfloat16, rngs=rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        return block(x, lambda name, x: getattr(self, name)(x))


def flax_nnx(layers: int, recipe: Any) -> Side:
    """Unrolled layers in Flax NNX."""
    rngs = nnx.Rngs(0)
    model: Any = nnx.Dict({f"layer_{i}": NNXBlock(rngs) for i in range(layers)})
    graph, params = nnx.split(model if recipe is None else jlp.nnx.convert(model, recipe))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for layer in nnx.merge(graph, params).values():
            x = layer(x)
        return squares(x)

    return loss, params, X


class LinenModel(nn.Module):
    """Unrolled layers in Flax Linen."""

    layers: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(self.layers):

            def product(name: str, x: jax.Array, i: int = i) -> jax.Array:
                return nn.Dense(SHAPES[name][1], use_bias=False, dtype=jnp.bfloat16, name=f"layer_{i}_{name}")(x)

            x = block(x, product)
        return squares(x)


def flax_linen(layers: int, recipe: Any) -> Side:
    """Unrolled layers in Flax Linen."""
    model: Any = LinenModel(layers)
    model = model if recipe is None else jlp.linen.convert(model, recipe)
    params = {f"layer_{i}_{name}": {"kernel": jnp.zeros(s)} for i in range(layers) for name, s in SHAPES.items()}
    return model.apply, {"params": params}, X


def equinox(layers: int, recipe: Any) -> Side:
    """Unrolled layers in Equinox."""
    import equinox as eqx

    keys = jax.random.split(jax.random.key(0), layers * len(SHAPES)).reshape(layers, len(SHAPES))
    model = [
        {name: eqx.nn.Linear(*s, use_bias=False, key=key) for (name, s), key in zip(SHAPES.items(), row, strict=True)}
        for row in keys
    ]
    params, static = eqx.partition(model, eqx.is_array)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for layer in eqx.combine(params, static):
            x = block(x, lambda name, x, layer=layer: jax.vmap(layer[name])(x).astype(x.dtype))
        return squares(x)

    return transformed(loss, recipe), params, X


MODELS: dict[str, tuple[str, Callable[[int, Any], Side]]] = {  # the package that each needs
    "plain JAX": ("jax", plain),
    "Flax NNX": ("flax", flax_nnx),
    "Flax Linen": ("flax", flax_linen),
    "Equinox": ("equinox", equinox),
    "experts": ("jax", experts),
    "scan, `keep_ends`": ("jax", scanned),
    "LSTM": ("jax", lstm),
    **trainer_models.MODELS,
}


def measured(make: Callable[[], Side], profile: str | None = None) -> dict[str, float]:
    """Seconds of the processor to trace, lower, compile and call the gradient, and lines of the lowered program."""
    loss, params, batch = make()
    found: dict[str, float] = {}

    def timed(stage: str, call: Callable[[], Any]) -> Any:
        profiler = cProfile.Profile()
        begun = time.process_time()
        result = profiler.runcall(call) if profile == stage else call()
        found[stage] = time.process_time() - begun
        if profile == stage:
            pstats.Stats(profiler).sort_stats("cumulative").print_stats(80)
            pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
        return result

    jax.clear_caches()
    gc.collect()
    gc.freeze()  # else collections, at random, walk over all modules and what other sides have left
    traced = timed("trace", lambda: jax.jit(jax.grad(loss)).trace(params, batch))
    lowered = timed("lower", traced.lower)
    found["lines"] = lowered.as_text().count("\n")
    step = timed("compile", lowered.compile)
    jax.block_until_ready(step(params, batch))
    timed("call", lambda: jax.block_until_ready([step(params, batch) for _ in range(CALLS)]))
    found["call"] /= CALLS
    return found


def main() -> None:
    """Measures the models in turn and prints medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recipe", choices=RECIPES, help="default: all")
    parser.add_argument("--profile", choices=("trace", "lower", "compile"), help="prints where this stage's time goes")
    parser.add_argument(
        "--save", nargs="?", const="tracing_1", metavar="NAME", help="writes benchmarks/results/NAME.json"
    )
    options = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    recipes = {None: None} | {k: v for k, v in RECIPES.items() if options.recipe in (None, k)}
    results = {}
    for name in options.models or [name for name in MODELS if name not in trainer_models.MODELS]:
        package, make = MODELS[name]
        if importlib.util.find_spec(package) is None:
            print(f"{name}: {package} is not installed", flush=True)
            continue
        sides = {recipe: functools.partial(make, options.layers, rules) for recipe, rules in recipes.items()}
        for rules in recipes.values():
            measured(functools.partial(make, 1, rules))  # the first call loads modules
        found: dict[Any, list[dict[str, float]]] = {recipe: [] for recipe in sides}
        for _ in range(options.rounds):
            for recipe, side in sides.items():
                found[recipe].append(measured(side, options.profile))
        medians = {
            recipe or "plain": {stage: statistics.median(run[stage] for run in runs) for stage in runs[0]}
            for recipe, runs in found.items()
        }
        results[name] = medians
        for recipe, stages in medians.items():
            text = ", ".join(f"{k} {v:8.3f} ({v / medians['plain'][k]:4.2f}x)" for k, v in stages.items())
            print(f"{name:18} {recipe:6} {text}", flush=True)
        if options.save:  # what there is: a run over all models is long
            settings = {"layers": options.layers, "rounds": options.rounds}
            timing.save(options.save, {"settings": settings, "results": results})


if __name__ == "__main__":
    main()
