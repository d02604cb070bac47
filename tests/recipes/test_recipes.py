"""Recipes: frozen descriptions, hashable, with defaults from the environment."""

import dataclasses

import jax.numpy as jnp
import pytest
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec.recipes.roles import GEMMS

FIELDS = {
    "disable_rht": "JAXLOWPREC_NVFP4_DISABLE_RHT",
    "disable_stochastic_rounding": "JAXLOWPREC_NVFP4_DISABLE_STOCHASTIC_ROUNDING",
    "disable_2d_quantization": "JAXLOWPREC_NVFP4_DISABLE_2D_QUANTIZATION",
    "row_scaled_activation": "JAXLOWPREC_NVFP4_ROW_SCALED_ACTIVATION",
}


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for variable in FIELDS.values():
        monkeypatch.delenv(variable, raising=False)


def test_the_fields_and_defaults_are_transformer_engines():
    overrides = {"backward_override": None, "forward_override": None}  # the second one is our own
    others = {"nvfp4_4over6": "none", "nvfp4_4over6_err_mode": "MAE"}
    fields = dataclasses.asdict(jlp.NVFP4BlockScaling())
    assert jlp.Sums(**fields.pop("sums")) == jlp.Sums()  # our own
    assert fields == dict.fromkeys(FIELDS, False) | overrides | others


def test_a_recipe_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        jlp.NVFP4BlockScaling().disable_rht = True


@pytest.mark.parametrize("field", FIELDS)
def test_recipes_are_equal_and_hash_alike_when_their_fields_are(field):
    default, other = jlp.NVFP4BlockScaling(), jlp.NVFP4BlockScaling(**{field: True})
    assert default == jlp.NVFP4BlockScaling() and hash(default) == hash(jlp.NVFP4BlockScaling())
    assert other == jlp.NVFP4BlockScaling(**{field: True}) and other != default
    assert len({default, jlp.NVFP4BlockScaling(), other}) == 2


class TestRoles:
    """The table in the class's docstring, as data."""

    def test_of_the_default_recipe(self):
        recipe = jlp.NVFP4BlockScaling()
        assert recipe.roles().input == jlp.Role(jlp.NVFP4((1, 16)), "nearest", jlp.Hadamard())
        assert recipe.roles().weight == jlp.Role(jlp.NVFP4((16, 16)), "nearest", None)
        assert recipe.roles().gradient == jlp.Role(jlp.NVFP4((1, 16)), "stochastic", jlp.Hadamard())

    @pytest.mark.parametrize(("mode", "rule"), [("MAE", "four_over_six"), ("MSE", "four_over_six_mse")])
    @pytest.mark.parametrize("tensors", ["none", "weights", "activations", "all"])
    def test_four_over_six(self, tensors, mode, rule):
        roles = jlp.NVFP4BlockScaling(disable_rht=True, nvfp4_4over6=tensors, nvfp4_4over6_err_mode=mode).roles()
        assert roles.input.format == jlp.NVFP4((1, 16), rule if tensors in ("activations", "all") else "six")
        assert roles.weight.format == jlp.NVFP4((16, 16), rule if tensors in ("weights", "all") else "six")
        assert roles.gradient == jlp.Role(jlp.NVFP4(), "stochastic")

    @pytest.mark.parametrize("tensors", ["activations", "all"])
    def test_four_over_six_does_not_take_rotated_inputs(self, tensors):
        with pytest.raises(ValueError, match=f'nvfp4_4over6="{tensors}" and disable_rht=False; .* or disable_rht=True'):
            jlp.NVFP4BlockScaling(nvfp4_4over6=tensors)
        assert jlp.NVFP4BlockScaling(nvfp4_4over6="weights").roles().input.hadamard

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            (
                {"rounding": "stochastic"},
                'rounding="stochastic" and format=.*; a choice among random outcomes is biased',
            ),
            ({"hadamard": jlp.Hadamard()}, "hadamard=.* and format=.*; scales of the least error shorten"),
        ],
    )
    def test_a_role_refuses_what_would_bias_gradients(self, options, why):
        with pytest.raises(ValueError, match=why):
            jlp.Role(jlp.NVFP4(scale_rule="search"), **options)

    @pytest.mark.parametrize("field", ["nvfp4_4over6", "nvfp4_4over6_err_mode"])
    @pytest.mark.parametrize("value", [True, None, "mae", "both"])
    def test_four_over_six_of_another_value(self, field, value):
        with pytest.raises(ValueError, match=f"NVFP4BlockScaling: {field}=.*; needs "):
            jlp.NVFP4BlockScaling(**{field: value})

    def test_without_rht_nothing_is_rotated(self):
        recipe = jlp.NVFP4BlockScaling(disable_rht=True)
        assert (recipe.roles().input.hadamard, recipe.roles().weight.hadamard, recipe.roles().gradient.hadamard) == (
            None,
            None,
            None,
        )
        assert recipe.roles().gradient.rounding == "stochastic"

    def test_without_stochastic_rounding_gradients_round_to_nearest(self):
        recipe = jlp.NVFP4BlockScaling(disable_stochastic_rounding=True)
        assert recipe.roles().gradient == jlp.Role(jlp.NVFP4(), "nearest", jlp.Hadamard())

    def test_without_2d_quantization_weights_have_blocks_of_one_row(self):
        recipe = jlp.NVFP4BlockScaling(disable_2d_quantization=True)
        assert recipe.roles().weight == jlp.Role(jlp.NVFP4((1, 16)))
        assert recipe.roles().input == jlp.NVFP4BlockScaling().roles().input

    @pytest.mark.parametrize("recipe", [jlp.NVFP4BlockScaling(), jlp.NVFP4BlockScaling(disable_rht=True)], ids=str)
    def test_both_operands_of_wgrad_are_rotated_alike(self, recipe):
        assert recipe.roles().input.hadamard == recipe.roles().gradient.hadamard

    def test_the_docstring_shows_them(self):
        recipe = jlp.NVFP4BlockScaling()
        for name in ("input", "weight", "gradient"):
            role = getattr(recipe.roles(), name)
            blocks = "x".join(map(str, role.format.block))
            row = f"| {name} | {blocks} | {role.rounding} | {'yes' if role.hadamard else 'no'} |"
            assert row in jlp.NVFP4BlockScaling.__doc__


@pytest.mark.parametrize(("override", "shown"), [("high_precision", "-"), ("dequantized", "decoded")])
def test_a_backward_override_is_explained(override, shown):
    recipe = jlp.MXFP8BlockScaling(backward_override=override)
    table = str(jlp.explain(lambda w, x: x @ w, jlp.PerLayer((), recipe), jnp.ones((64, 48)), jnp.ones((8, 64))))
    assert f"fprop MXFP8 E4M3 1x32, dgrad {shown}  fprop MXFP8 E4M3 1x32, wgrad {shown}  -" in table
    assert table.splitlines()[1].split()[2:] in (
        line.split()[2:] for line in str(jlp.explain(jlp.nnx.Linear(64, 48, rngs=nnx.Rngs(0)), recipe)).splitlines()
    )


class TestForwardOverride:
    def test_leaves_the_other_gemms_as_they_are(self):
        plain, roles = jlp.NVFP4BlockScaling(), jlp.NVFP4BlockScaling(forward_override="high_precision").roles()
        assert roles.operands("fprop") == "high_precision"
        for gemm in ("dgrad", "wgrad"):
            assert roles.operands(gemm) == plain.roles().operands(gemm)

    def test_is_what_a_recipe_without_fprop_is(self):
        """Which any other recipe can be given to, see `PerGemm`."""
        roles = jlp.NVFP4BlockScaling(forward_override="high_precision").roles()
        by_gemm = jlp.PerGemm(dgrad=jlp.NVFP4BlockScaling(), wgrad=jlp.NVFP4BlockScaling()).roles()
        assert [roles.operands(g) for g in GEMMS] == [by_gemm.operands(g) for g in GEMMS]

    def test_says_so_in_explanations(self):
        recipe = jlp.NVFP4BlockScaling(forward_override="high_precision")
        explained = jlp.explain(jlp.nnx.Linear(64, 48, rngs=nnx.Rngs(0)), recipe)
        assert "fprop -, dgrad NVFP4 16x16  fprop -, wgrad NVFP4 1x16  NVFP4 1x16" in str(explained)
        assert explained.formats == {"": None}
        assert (
            "fprop in high precision: XLA; dgrad NVFP4 1x16 by NVFP4 16x16"
            in jlp.supported(recipe, platform="cpu").reason
        )

    @pytest.mark.parametrize("value", ["dequantized", "bf16", True])
    def test_has_one_value(self, value):
        message = f'NVFP4BlockScaling: forward_override={value!r}; needs None or "high_precision"'
        with pytest.raises(ValueError, match=message):
            jlp.NVFP4BlockScaling(forward_override=value)

    def test_and_rows_with_amaxes_of_their_own_exclude_each_other(self):
        with pytest.raises(ValueError, match="row_scaled_activation=True, which says how fprop"):
            jlp.NVFP4BlockScaling(row_scaled_activation=True, forward_override="high_precision")

    @pytest.mark.parametrize("backward", ["high_precision", "dequantized"])
    def test_and_the_other_one_would_quantise_nothing(self, monkeypatch, backward):
        message = f"forward_override='high_precision' and backward_override='{backward}', so nothing would be quantised"
        with pytest.raises(ValueError, match=message):
            jlp.NVFP4BlockScaling(backward_override=backward, forward_override="high_precision")
        monkeypatch.setenv("JAXLOWPREC_BACKWARD_OVERRIDE", backward)
        with pytest.raises(ValueError, match=message):
            jlp.NVFP4BlockScaling(forward_override="high_precision")


@pytest.mark.parametrize(("field", "variable"), FIELDS.items())
class TestEnvironment:
    @pytest.mark.parametrize(
        ("value", "meaning"),
        [("1", True), ("true", True), ("ON", True), ("0", False), ("", False), ("False", False), (" no ", False)],
    )
    def test_a_default_is_read_when_the_recipe_is_made(self, monkeypatch, field, variable, value, meaning):
        before = jlp.NVFP4BlockScaling()
        monkeypatch.setenv(variable, value)
        assert getattr(jlp.NVFP4BlockScaling(), field) is meaning
        assert getattr(before, field) is False
        assert (
            sum(getattr(jlp.NVFP4BlockScaling(), f) for f in FIELDS) == meaning
        )  # no other field follows this variable

    def test_an_argument_comes_before_it(self, monkeypatch, field, variable):
        monkeypatch.setenv(variable, "1")
        assert getattr(jlp.NVFP4BlockScaling(**{field: False}), field) is False

    def test_a_value_that_is_neither_yes_nor_no_raises(self, monkeypatch, field, variable):
        monkeypatch.setenv(variable, "maybe")
        with pytest.raises(ValueError, match=f"{variable}='maybe'"):
            jlp.NVFP4BlockScaling()


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [1, 0, None, "yes"])
def test_a_field_that_is_no_bool_raises(field, value):
    with pytest.raises(TypeError, match=f"NVFP4BlockScaling: {field}={value!r}"):
        jlp.NVFP4BlockScaling(**{field: value})


def test_an_unknown_field_raises():
    with pytest.raises(TypeError, match="margin"):
        jlp.NVFP4BlockScaling(margin=0)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: jlp.Role("NVFP4"), TypeError, "Role: format='NVFP4'; needs a format such as NVFP4()"),
        (lambda: jlp.Role(jlp.NVFP4), TypeError, "Role: format=<class .*; needs a format"),
        (
            lambda: jlp.Role(jlp.NVFP4(), "up"),
            ValueError,
            'Role: rounding=\'up\'; needs "nearest", "stochastic" or "eden"',
        ),
        (lambda: jlp.Role(jlp.NVFP4(), "nearest", True), TypeError, "Role: hadamard=True; needs a jaxlowprec.Hadamard"),
        (
            lambda: jlp.Roles(jlp.NVFP4(), None, None),
            TypeError,
            "Roles: input=NVFP4.*; needs a jaxlowprec.Role or None",
        ),
        (lambda: jlp.Roles(None, None, None, ste="no"), ValueError, 'Roles: ste=\'no\'; needs "identity", "clipped"'),
        (lambda: jlp.Roles(None, None, None, None, "int8"), ValueError, "Roles: served_dtype='int8'; needs"),
    ],
)
def test_roles_name_what_they_cannot_be_made_of(make, error, message):
    with pytest.raises(error, match=message):
        make()
