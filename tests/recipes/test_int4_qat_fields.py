"""Fields of `Int4QAT` and `WeightQAT`: defaults, errors, and what the environment says."""

import dataclasses

import jax.numpy as jnp
import pytest

import jaxlowprec as jlp

VARIABLES = {
    "group_size": ("JAXLOWPREC_INT4_QAT_GROUP_SIZE", "64", 64, "0"),
    "symmetric": ("JAXLOWPREC_INT4_QAT_SYMMETRIC", "0", False, "maybe"),
    "scale_dtype": ("JAXLOWPREC_INT4_QAT_SCALE_DTYPE", "float16", "float16", "float32"),
    "ste": ("JAXLOWPREC_QAT_STE", "clipped", "clipped", "soft"),
}


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for variable, *_ in VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)


def test_has_these_defaults():
    assert dataclasses.asdict(jlp.Int4QAT()) == {
        "group_size": 128,
        "symmetric": True,
        "scale_dtype": "bfloat16",
        "ste": "identity",
        "include": (".*",),
        "exclude": jlp.DEFAULT_EXCLUDE,
    }
    assert jlp.Int4QAT().weight_format == jlp.Int4(128)


def test_is_frozen_hashable_and_equal_by_its_fields():
    recipe = jlp.Int4QAT(group_size=64, symmetric=False, scale_dtype=jnp.float16, exclude=["a"])
    assert recipe == jlp.Int4QAT(64, False, "float16", exclude=("a",)) != jlp.Int4QAT(64)
    assert len({recipe, jlp.Int4QAT(64, False, "float16", exclude=("a",))}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.group_size = 32


@pytest.mark.parametrize(
    ("error", "message", "fields"),
    [
        (ValueError, "Int4: group_size=0", {"group_size": 0}),
        (TypeError, "Int4: symmetric=1", {"symmetric": 1}),
        (ValueError, "Int4: scale_dtype='float32'", {"scale_dtype": "float32"}),
        (ValueError, 'Int4QAT: ste=\'soft\'; needs "identity" or "clipped"', {"ste": "soft"}),
        (TypeError, "Int4QAT: include='mlp'; needs a tuple of regular expressions", {"include": "mlp"}),
        (TypeError, "Int4QAT: exclude=\\(1,\\); needs a tuple", {"exclude": (1,)}),
        (ValueError, r"exclude has '\(', which is not a valid regular expression", {"exclude": ("(",)}),
    ],
)
def test_a_field_that_does_not_fit(error, message, fields):
    with pytest.raises(error, match=message):
        jlp.Int4QAT(**fields)


def test_of_another_format_needs_one():
    with pytest.raises(TypeError, match="WeightQAT: weight_format='int4'; needs a format"):
        jlp.WeightQAT("int4")


@pytest.mark.parametrize("field", VARIABLES)
def test_a_default_comes_from_the_environment_of_now(monkeypatch, field):
    variable, text, value, wrong = VARIABLES[field]
    before = jlp.Int4QAT()
    monkeypatch.setenv(variable, text)
    assert jlp.Int4QAT() == dataclasses.replace(before, **{field: value}) != before
    assert jlp.Int4QAT(**{field: getattr(before, field)}) == before
    monkeypatch.setenv(variable, wrong)
    with pytest.raises(ValueError, match=f"{variable}='{wrong}'"):
        jlp.Int4QAT()
    monkeypatch.setenv(variable, "")
    assert jlp.Int4QAT() == before
