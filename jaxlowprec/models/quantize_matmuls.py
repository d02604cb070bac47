"""quantize_matmuls: any JAX function with its matrix products by parameters computed under recipes."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import operator
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxlowprec.arguments import shown
from jaxlowprec.layers import delayed_scaling
from jaxlowprec.layers.low_rank import is_quantized
from jaxlowprec.layers.subscripts import has_matrices
from jaxlowprec.models.kernels import layer_name
from jaxlowprec.models.transform import modules
from jaxlowprec.models.transform.evaluating import evaluate
from jaxlowprec.models.transform.parameter_trace import ParameterTrace
from jaxlowprec.models.transform.repeated import is_abstract
from jaxlowprec.models.transform.uses import Uses
from jaxlowprec.models.transform.weights import TracedValue, Weight, arrays_of, is_float, is_loaded
from jaxlowprec.recipes import silence
from jaxlowprec.recipes.autocast import FROM_CONTEXT, resolve
from jaxlowprec.recipes.fields import Use
from jaxlowprec.recipes.roles import Recipe
from jaxlowprec.recipes.transformer_engine import DelayedScaling

_WHO = "quantize_matmuls"
_AGAIN = "{} is quantised already, and its own rules hold: transform its __wrapped__"


def quantize_matmuls(
    fn: Callable[..., Any],
    rules: Recipe | None = FROM_CONTEXT,
    *,
    params: int | str | Sequence[int | str] = 0,
    names: Sequence[str] | None = None,
) -> Callable[..., Any]:
    """fn with its matrix products by parameters computed under recipes: a transformation, as `jax.grad` is one.

    Every `dot_general` and `ragged_dot` of which one operand is a leaf of the parameters becomes this library's
    product (`dot_general`, `grouped_matmul`), forward and backward. So does a convolution whose windows neither overlap
    nor reach into padding: 1x1, or with strides equal to the kernel's sizes, as the patch embedding of a vision
    transformer has them. It is the product of its patches and the kernel; blocks lie along [spatial axes..., features]
    of each, whatever the layout.

    The leaf may have been transposed, reshaped, cut, indexed, padded, repeated, multiplied by a scalar, cast to another
    float dtype or handed to a loop, and elements of it replaced by a number (`jnp.where`), in `jit`, `scan`,
    `while_loop`, `cond`, `remat` and `shard_map` too. Leaves may have been joined (`jnp.stack`, `jnp.concatenate`), if
    the recipe says the same of all of them; a stack that `scan` takes apart is run in pieces where it does not. A cast
    parameter is quantised from its own dtype, and its gradient has that dtype. Everything else runs as fn has it:
    without a recipe for any product, the result is fn's, bit for bit.

    What stays as it is: products of two activations or of two parameters, other convolutions (overlapping windows,
    padding, groups, dilation), and what is inside `custom_vjp` and `custom_jvp` functions; `explain` lists them. So do
    products by what was computed from parameters, such as one multiplied by a mask; a warning names the largest.
    Transform the function that computes the loss, and then take its gradient: in a function that contains `jax.grad`,
    gradients' products would be taken for layers.

    The name of a layer, by which `PerLayer` chooses its recipe, is the path of its parameter, such as "block_0/mlp/up".
    A last "kernel", "w", "weight", "weights", "embedding" or "embeddings" and a first "params" are left out, so that it
    is the layer's path in a Flax model. A framework that hands over a list of parameters knows better names than their
    numbers: give them as `names`.

    Each call traces fn: call the result under `jax.jit`.

    `DelayedScaling` keeps amax histories for each layer, in an argument that the new function has and fn has not:
    `scaling_state`. `quantized.init_state(*args)` makes it. Its gradient is its new value, as `delayed_scaling` says;
    the layers of a stack share one, and the experts of a `ragged_dot` have their own.

    Arguments:
        fn: a function that JAX can trace.
        rules: the recipe, a `PerLayer` of recipes, or None: high precision. Default: the context's (`autocast`).
        params: which arguments are parameters, by position or by name: trees of arrays, or an NNX module. A leaf of a
            tree may be a QuantizedArray, which is multiplied from its codes where it is contracted along the axis that
            it is quantised along, or a weight with an adapter (`jaxlowprec.lora`). fn sees it as an array.
        names: paths to take instead of the leaves' own: one for each leaf of the parameters, in the order of
            `jax.tree.leaves`, such as the `v.path` of a Keras model's variables.

    Returns:
        A function of fn's arguments.

    Raises:
        TypeError: fn is not callable or a model that holds its parameters, rules is no recipe, or names are no texts.
        ValueError: params names no argument; or, when called, there are more or fewer names than leaves.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> def loss(params, x):
    ...     return jnp.square(jnp.tanh(x @ params["up"]) @ params["down"]).mean()
    >>> params = {"up": jnp.ones((32, 64)), "down": jnp.ones((64, 32))}
    >>> quantized = jlp.quantize_matmuls(loss, jlp.NVFP4BlockScaling())
    >>> grads = jax.jit(jax.grad(quantized))(params, jnp.ones((16, 32), jnp.bfloat16))
    >>> grads["up"].shape, grads["up"].dtype
    ((32, 64), dtype('float32'))
    """
    modules.check_is_function(_WHO, fn)
    chosen, named = _chosen(params), _checked(names)
    resolve(_WHO, rules)  # a wrong one is an error here, not in the first call

    @functools.wraps(fn)
    def quantized(*args: Any, scaling_state: Any = None, **kwargs: Any) -> Any:
        recipe = resolve(_WHO, rules)
        if recipe is None and not any(map(is_loaded, jax.tree.leaves((args, kwargs), is_leaf=is_loaded))):
            return fn(*args, **kwargs)
        traced = TracedFunction(fn, chosen, args, kwargs, recipe, named)
        if recipe is not None:
            silence.warn_once(_WHO, recipe, traced.left_alone(), depth=1)
        if recipe is None:
            pass  # every product is in high precision, or by a quantised parameter
        elif rules is FROM_CONTEXT:  # the scope asks when it is left; fn may have layers that follow it by themselves
            silence.saw(recipe, traced.products)
        else:
            again = isinstance(getattr(fn, "transformation", None), QuantizedMatmuls)
            remedy = _AGAIN.format(_named(fn)) if again else "jaxlowprec.explain says why"
            silence.warn_once(_WHO, recipe, silence.complaints(recipe, traced.names, traced.products, remedy), depth=1)
        return traced.computed(scaling_state) if traced.changes or traced.has_loaded else fn(*args, **kwargs)

    def init_state(*args: Any, **kwargs: Any) -> dict[str, Any]:
        recipe = resolve(_WHO, rules)
        return {} if recipe is None else TracedFunction(fn, chosen, args, kwargs, recipe, named).init_state()

    transformed: Any = quantized
    transformed.init_state = init_state
    transformed.transformation = QuantizedMatmuls(fn, rules, chosen, named)
    return transformed


@dataclasses.dataclass(frozen=True)
class QuantizedMatmuls:
    """The arguments of `quantize_matmuls`, which the transformed function has as its attribute `transformation`.

    Attributes:
        fn, rules: its arguments.
        params: the arguments of fn that are parameters.
        names: of their leaves, if they are given.
    """

    fn: Callable[..., Any]
    rules: Any
    params: tuple[int | str, ...] = (0,)
    names: tuple[str, ...] | None = None

    @classmethod
    def of(cls, fn: Any, rules: Any) -> QuantizedMatmuls:
        """The arguments of a transformed function, with other rules if some are given; the defaults for another one."""
        given = getattr(fn, "transformation", None)
        if not isinstance(given, cls):
            return cls(fn, rules)
        return given if rules is FROM_CONTEXT else dataclasses.replace(given, rules=rules)


def _checked(names: Any) -> tuple[str, ...] | None:
    """The names of the leaves."""
    if names is None:
        return None
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(n, str) and n for n in names):
        raise TypeError(f"{_WHO}: names={shown(names)}; needs a list of texts, one for each leaf of the parameters")
    return tuple(names)


def _chosen(params: Any) -> tuple[int | str, ...]:
    """The arguments that are parameters."""
    given = (params,) if isinstance(params, str) or not isinstance(params, Sequence) else tuple(params)
    chosen: list[int | str] = []
    for one in given:
        if isinstance(one, str):
            chosen.append(one)
            continue
        try:
            chosen.append(operator.index(one))
        except TypeError:
            break
    if isinstance(params, bool) or len(chosen) != len(given) or not chosen:
        raise TypeError(f"{_WHO}: params={shown(params)}; needs an argument's position or name, or several of them")
    return tuple(chosen)


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """An array among the arguments.

    Attributes:
        name: the layer's name if it is a parameter, else None.
        shape: its shape.
        loaded: the parameter if it is quantised or has an adapter, else None.
    """

    name: str | None
    shape: tuple[int, ...]
    loaded: Any = None


class TracedFunction:
    """A function, traced for these arguments, and what a recipe does to its products.

    Attributes:
        leaves: the arrays among the arguments.
        trace: of its parameters.
        changes: whether any product follows the recipe.
        has_loaded: whether a parameter is quantised or has an adapter, so that fn itself cannot be called with it.
    """

    def __init__(
        self,
        fn: Any,
        params: tuple[int | str, ...],
        args: Any,
        kwargs: Any,
        recipe: Recipe | None,
        names: tuple[str, ...] | None = None,
    ):
        chosen = _positions(fn, params, args, kwargs)
        given, self._modules = modules.opened((args, kwargs))
        leaves, structure = jax.tree_util.tree_flatten_with_path(_loaded(given, chosen))
        arrays = [i for i, (_, leaf) in enumerate(leaves) if _is_array(leaf)]
        self._chosen, self._arrays, self._leaves = chosen, arrays, ([leaf for _, leaf in leaves], structure)
        self._values = [leaves[i][1].kernel if isinstance(leaves[i][1], _Loaded) else leaves[i][1] for i in arrays]
        layers = _layer_names([path for path, _ in leaves], chosen, names)
        self.leaves = [
            _Leaf(layers[i], np.shape(v), v if is_loaded(v) else None)
            for i, v in zip(arrays, self._values, strict=True)
        ]

        def flat(*values: Any) -> Any:
            given = dict(zip(arrays, values, strict=True))
            all_leaves = [given.get(i, leaf) for i, (_, leaf) in enumerate(leaves)]
            (args, kwargs), made = modules.closed(jax.tree.unflatten(structure, all_leaves))
            result = fn(*args, **kwargs)
            return result, modules.changes(made)

        try:
            types = [jax.ShapeDtypeStruct(v.shape, v.dtype) if is_loaded(v) else v for v in self._values]
            self._closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*types)
        except jax.errors.ConcretizationTypeError as error:
            error.add_note(f"{_WHO}: {_named(fn)} has to be traceable by jax.jit")
            raise
        self._results = jax.tree.structure(shapes)
        self._weights = tuple(self._weight(i, recipe) for i in range(len(self.leaves)))
        self.has_loaded = any(map(is_loaded, self._values))
        self.trace = ParameterTrace(recipe)
        self.changes = self.trace.through(self._closed.jaxpr, self._weights).changes
        if uses := self._uses():
            self.trace = ParameterTrace(recipe, uses)
            self.changes = self.trace.through(self._closed.jaxpr, self._weights).changes

    def _weight(self, number: int, recipe: Recipe | None) -> Weight | None:
        """The parameter that an array is."""
        name, value = self.leaves[number].name, self._values[number]
        if name is None or not is_float(self._closed.jaxpr.invars[number].aval):
            return None
        ends = None if recipe is None or is_quantized(value) else recipe.ends(name)
        if ends is not None and is_loaded(value):  # some of its layers follow the recipe, others do not
            self._values[number] = value.merged()
        return Weight(name, number, ends=ends, loaded=is_loaded(self._values[number]))

    def _uses(self) -> dict[str, Use]:
        """The uses of layers, where the recipe asks for them: see `DEFAULT_EXCLUDE`."""
        trace, rules = self.trace, self.trace.recipe
        named = [(single.name, product) for product in trace.products for single in product.weight.singles]
        if rules is None or not any(rules.within(n) != rules.within(n, use) for n, _ in named for use in Use):
            return {}
        tables = [self.leaves[i].shape[-2] for i, by in trace.lost.items() if by == "gather"]
        uses = Uses(self._closed.jaxpr, trace.by_equation)
        found = {name: uses.of(product, name, max(tables, default=0)) for name, product in named}
        return {name: use for name, use in found.items() if use is not Use.UNKNOWN}

    def trace_if_loaded(self, numbers: set[int]) -> ParameterTrace:
        """The trace of the function if the parameters of these numbers are loaded: quantised, or with an adapter."""
        trace = ParameterTrace(self.trace.recipe, self.trace.uses)
        weights = [
            dataclasses.replace(w, loaded=True) if w is not None and w.leaf in numbers else w for w in self._weights
        ]
        for weight in trace.through(self._closed.jaxpr, tuple(weights)).results:
            if weight is not None and weight.loaded:
                trace.lost.setdefault(weight.leaf, "its result")
        return trace

    def value(self, number: int) -> Any:
        """The array of that number among the leaves."""
        return self._values[number]

    def has_ends(self, number: int) -> bool:
        """Whether the rules leave the first or last layers of such a stack in high precision."""
        weight = self._weights[number]
        return weight is not None and weight.ends is not None

    def parameters(self, replaced: Mapping[int, Any]) -> list[Any]:
        """The arguments that are parameters, with other values for the leaves of these numbers."""
        leaves, structure = self._leaves
        values = [leaf.kernel if isinstance(leaf, _Loaded) else leaf for leaf in leaves]
        for number, value in replaced.items():
            values[self._arrays[number]] = value
        args, kwargs = jax.tree.unflatten(structure, values)
        return [kwargs[key] if isinstance(key, str) else args[key] for key in self._chosen]

    @property
    def names(self) -> list[str]:
        """The names of all layers: of each parameter that could be a weight, or is one in part."""
        found = {single.leaf for product in self.trace.products for single in product.weight.singles}
        found |= {i for i, leaf in enumerate(self.leaves) if has_matrices(leaf.shape)}
        return [w.name for w in self._weights if w is not None and w.leaf in found]

    @property
    def products(self) -> list[str]:
        """The names of the layers that a recipe can change."""
        used = [product.weight for product in self.trace.products if not product.reason]
        return [single.name for weight in used for single in weight.singles]

    def left_alone(self) -> list[str]:
        """A warning about parameters that the recipe is for, in products that it cannot quantise; or []."""
        found = {}
        for product in self.trace.products:
            for single in product.weight.singles if product.avoidable else ():
                if self.trace.recipe_at(single.name) is not None:
                    found[single.leaf] = single.name, product.reason
        if not found:
            return []
        largest = sorted(found, key=lambda leaf: -math.prod(self.leaves[leaf].shape))
        named = silence.some([f"{found[i][0]!r} {list(self.leaves[i].shape)} ({found[i][1]})" for i in largest])
        return [
            f"these parameters are in products that stay in high precision: {named}; jaxlowprec.explain shows them all"
        ]

    def _delayed(self) -> dict[str, tuple[DelayedScaling, int | None]]:
        """The recipes of the layers that keep amax histories, and the number of experts if a layer has some, by the
        layers' names."""
        found = {}
        for product in self.trace.products:
            name = product.weight.name
            recipe = None if product.reason else self.trace.recipe_at(name)
            if recipe is not None and recipe.delayed:
                found[name] = recipe.delayed, product.shape[0] if product.grouped else None
        return found

    def init_state(self) -> dict[str, Any]:
        """The state of delayed scaling before the first step."""
        states = {
            name: delayed_scaling.init_state(recipe, num_experts=experts)
            for name, (recipe, experts) in self._delayed().items()
        }
        return {delayed_scaling.OVERWRITE_WITH_GRADIENT: states} if states else {}

    def computed(self, scaling_state: Any) -> Any:
        """The function's result under the recipe."""
        needed = self._delayed()
        key = delayed_scaling.OVERWRITE_WITH_GRADIENT
        given = scaling_state.get(key, {}) if isinstance(scaling_state, Mapping) else {}
        if missing := sorted(needed.keys() - given.keys()):
            raise ValueError(
                f"{_WHO}: scaling_state={shown(scaling_state)} has no amax histories for {', '.join(missing)}, which "
                "DelayedScaling needs; make it by the function's init_state, with the same arguments"
            )

        def run(variables: Any) -> list[Any]:
            arguments = [
                TracedValue(None if is_loaded(v) else v, w, v)
                for v, w in zip(variables["values"], self._weights, strict=True)
            ]
            jaxpr, states = self._closed.jaxpr, variables.get(key, {})
            in_runs = not needed and any(map(is_abstract, jax.tree.leaves(self._values)))
            results = evaluate(self.trace, states, jaxpr, self._closed.consts, arguments, in_runs=in_runs)
            return arrays_of(results, jaxpr.outvars)

        variables = {"values": self._values} | ({key: {name: given[name] for name in needed}} if needed else {})
        # A loop reaches a state more than once; so may the function.
        results = jax.jit(delayed_scaling.combined_by_max(run))(variables) if needed else run(variables)
        result, states = jax.tree.unflatten(self._results, results)
        modules.update(self._modules, states)
        return result


class _Loaded:
    """A quantised or adapted parameter, which the function sees as one array."""

    def __init__(self, kernel: Any):
        self.kernel = kernel


def _loaded(given: Any, chosen: Container[int | str]) -> Any:
    """The arguments (args, kwargs), with the quantised and adapted parameters as leaves."""

    def one(node: Any) -> Any:
        return _Loaded(node) if is_loaded(node) else node

    def of(key: int | str, argument: Any) -> Any:
        is_leaf = lambda node: is_loaded(node) or isinstance(node, modules.ModuleTree)  # noqa: E731
        return jax.tree.map(one, argument, is_leaf=is_leaf) if key in chosen else argument

    args, kwargs = given
    return tuple(of(*item) for item in enumerate(args)), {key: of(key, value) for key, value in kwargs.items()}


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct | _Loaded)


def _named(fn: Any) -> str:
    return getattr(fn, "__qualname__", None) or shown(fn)


def _positions(fn: Any, params: tuple[int | str, ...], args: Any, kwargs: Any) -> dict[int | str, None]:
    """The given arguments that are parameters: positions as numbers, keywords as texts; in order, as a dict's keys."""
    found: dict[int | str, None] = {}
    try:
        names = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):  # a built-in function
        names = []
    for one in params:
        if isinstance(one, int) and -len(args) <= one < len(args):
            found[one % len(args)] = None
        elif isinstance(one, int) and 0 <= one < len(names) and names[one] in kwargs:
            found[names[one]] = None
        elif one in kwargs:
            found[one] = None
        elif one in names and names.index(one) < len(args):
            found[names.index(one)] = None
        else:
            raise ValueError(
                f"{_WHO}: params={one!r}, but {_named(fn)} is called with {len(args)} positional arguments and the "
                f"keywords {sorted(kwargs)}; needs the position or the name of one of them"
            )
    return found


def _layer_names(paths: list[Any], chosen: Container[int | str], names: tuple[str, ...] | None) -> list[str | None]:
    """The name of the layer of each leaf of the arguments; None for what is no parameter."""
    own: list[Any] = []
    for _, argument, *rest in paths:  # (args, kwargs), then the argument in one of them
        own.append(rest if getattr(argument, "idx", getattr(argument, "key", None)) in chosen else None)
    if names is not None:
        parameters = [i for i, path in enumerate(own) if path is not None]
        if len(names) != len(parameters):
            raise ValueError(
                f"{_WHO}: {len(names)} names, but the parameters have {len(parameters)} leaves; needs one for each, in "
                "the order of jax.tree.leaves"
            )
        for i, name in zip(parameters, names, strict=True):
            own[i] = [jax.tree_util.DictKey(name)]
    return [None if path is None else layer_name(path) for path in own]
