"""What calls of the public functions look like: defaults that say what they mean, options by their names."""

import copy
import inspect
import pickle
import pydoc
import types

import numpy as np
import pytest

import jaxlowprec as jlp
from tests.docs.test_site import script

MODULES = list(script("names").modules())


def callables(module):
    """The public functions and classes of a module by their names, with the parameters of each."""
    for name in module.__all__:
        value = getattr(module, name)
        if callable(value) and not isinstance(value, types.ModuleType):
            try:
                yield name, value, inspect.signature(value).parameters
            except ValueError:  # an exception without an __init__ of its own
                assert issubclass(value, Exception)


CALLABLES = {
    f"{module.__name__}.{name}": (value, parameters)
    for module in MODULES
    for name, value, parameters in callables(module)
}


def test_recipes_default_to_that_of_the_context():
    found = {
        name: parameter.default
        for name, (_, parameters) in CALLABLES.items()
        for parameter in parameters.values()
        if parameter.name in ("recipe", "rules") and parameter.default not in (parameter.empty, jlp.FROM_CONTEXT)
    }
    # None: enabled=False needs none, and rules of optimizer states are not those of a recipe
    assert found == {"jaxlowprec.autocast": None, "jaxlowprec.optim.quantized_state": None}
    assert "recipe: 'Recipe | None' = FROM_CONTEXT" in pydoc.render_doc(jlp.linear)
    assert str(jlp.FROM_CONTEXT) == "FROM_CONTEXT"


def test_the_default_is_itself_after_a_copy():
    for again in (copy.deepcopy(jlp.FROM_CONTEXT), pickle.loads(pickle.dumps(jlp.FROM_CONTEXT))):
        assert again is jlp.FROM_CONTEXT


@pytest.mark.parametrize("recipe", [..., "FROM_CONTEXT", jlp.NVFP4()])
def test_what_is_no_recipe_is_refused_with_the_remedy(recipe):
    with pytest.raises(TypeError, match=r"linear: recipe=.*; needs a recipe such as .*, or FROM_CONTEXT"):
        jlp.linear(np.ones((2, 16), np.float32), np.ones((16, 4), np.float32), recipe=recipe)


OPTIONAL_BY_PLACE = """
    bias biases beta residual mask recipe rules routing scheme reference tree limits names
""".split()  # noqa: SIM905
AS_IN_JAX = {  # drop-ins take by place what JAX's function takes by place, and the others what a like function of JAX's
    "jaxlowprec.dot_general": ["precision", "preferred_element_type"],
    "jaxlowprec.ragged_dot": ["precision", "preferred_element_type", "group_offset", "out_sharding"],
    "jaxlowprec.all_to_all_quantized": ["split_axis", "concat_axis"],
    "jaxlowprec.telemetry.value_and_grad": ["argnums", "has_aux"],
    "jaxlowprec.optim.adamw": ["b1", "b2", "eps", "weight_decay"],  # optax.adamw
    "jaxlowprec.optim.lion": ["b1", "b2", "weight_decay"],  # optax.lion
    "jaxlowprec.moe.route": ["k"],  # jax.lax.top_k
    "jaxlowprec.moe.dispatch": ["num_experts"],  # jax.nn.one_hot
}


def options_by_place(parameters):
    """The parameters that a call may give by place though they are neither an operand nor the format or recipe."""
    for name, parameter in parameters.items():
        plain = str(parameter.annotation).split(" ")[0] in ("int", "float", "bool")
        optional = parameter.default is not parameter.empty and name not in OPTIONAL_BY_PLACE
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) and (plain or optional):
            yield name


def test_options_are_keyword_only():
    functions = {name: parameters for name, (value, parameters) in CALLABLES.items() if not isinstance(value, type)}
    found = {name: given for name, parameters in functions.items() if (given := list(options_by_place(parameters)))}
    assert len(functions) > 90 and found == AS_IN_JAX


def test_norms_and_activations_are_those_of_ops():
    assert set(jlp.ops.__all__) <= set(jlp.__all__)
    for name in jlp.ops.__all__:
        assert getattr(jlp.ops, name) is getattr(jlp, name)
    with pytest.raises(AttributeError, match=r"module 'jaxlowprec.ops' has no attribute 'softmax'"):
        jlp.ops.softmax  # noqa: B018
