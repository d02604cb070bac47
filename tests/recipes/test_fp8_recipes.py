"""Recipes of the 8-bit formats: every field acts on a role, or raises."""

import dataclasses
import re

import pytest

import jaxlowprec as jlp
from jaxlowprec import Float8Block, Float8Tensor, MMParams, QParams, Role

DEFAULTS = {  # Transformer Engine's fields and defaults (transformer_engine_numerics.md 9)
    jlp.MXFP8BlockScaling: {
        "margin": 0,
        "fp8_format": "E4M3",
        "fp8_dpa": False,
        "fp8_mha": False,
        "enable_2d_quantization": False,
        "backward_override": None,
    },
    jlp.Float8BlockScaling: {
        "use_f32_scales": False,
        "fp8_format": "E4M3",
        "x_block_scaling_dim": 1,
        "w_block_scaling_dim": 2,
        "grad_block_scaling_dim": 1,
        "fp8_gemm_fprop": MMParams(True),
        "fp8_gemm_dgrad": MMParams(True),
        "fp8_gemm_wgrad": MMParams(True),
        "fp8_quant_fwd_inp": None,
        "fp8_quant_fwd_weight": None,
        "fp8_quant_bwd_grad": None,
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
    },
    jlp.Float8CurrentScaling: {
        "use_power_2_scales": False,
        "fp8_format": "HYBRID",
        "fp8_gemm_fprop": MMParams(False),
        "fp8_gemm_dgrad": MMParams(True),
        "fp8_gemm_wgrad": MMParams(True),
        "fp8_quant_fwd_inp": None,
        "fp8_quant_fwd_weight": None,
        "fp8_quant_bwd_grad": None,
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
    },
    jlp.DelayedScaling: {
        "margin": 0,
        "fp8_format": "HYBRID",
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "scaling_factor_compute_algo": None,
        "reduce_amax": True,
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
    },
}
FLAGS = {
    "JAXLOWPREC_FP8_BLOCK_SCALING_FP32_SCALES": (jlp.Float8BlockScaling, "use_f32_scales"),
    "JAXLOWPREC_FP8_CURRENT_SCALING_POWER_2_SCALES": (jlp.Float8CurrentScaling, "use_power_2_scales"),
}
OVERRIDE = "JAXLOWPREC_BACKWARD_OVERRIDE"
each_class = pytest.mark.parametrize("cls", DEFAULTS, ids=lambda c: c.__name__)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for variable in (*FLAGS, OVERRIDE):
        monkeypatch.delenv(variable, raising=False)


def formats(recipe):
    roles = recipe.roles()
    return roles.input.format, roles.weight.format, roles.gradient.format


@each_class
def test_fields_and_defaults_are_transformer_engines(cls):
    recipe = cls()
    fields = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(cls)}
    assert fields.pop("sums") == jlp.Sums()  # our own
    assert fields == DEFAULTS[cls]


@each_class
def test_recipes_are_frozen_values(cls):
    recipe, other = cls(), cls(fp8_format="HYBRID" if DEFAULTS[cls]["fp8_format"] == "E4M3" else "E4M3")
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.fp8_format = "E4M3"
    assert recipe == cls() and hash(recipe) == hash(cls()) and recipe != other
    assert len({recipe, cls(), other, *(c() for c in DEFAULTS)}) == 1 + len(DEFAULTS)


@each_class
def test_only_delayed_scaling_keeps_state(cls):
    recipe = cls()
    assert recipe.delayed is (recipe if cls is jlp.DelayedScaling else None)


class TestRoles:
    """What the recipes say of input, weight and gradient."""

    @pytest.mark.parametrize(
        ("recipe", "expected"),
        [
            (jlp.MXFP8BlockScaling(), (jlp.MXFP8(), jlp.MXFP8(), jlp.MXFP8())),
            (jlp.MXFP8BlockScaling(fp8_format="HYBRID"), (jlp.MXFP8(), jlp.MXFP8(), jlp.MXFP8("e5m2"))),
            (
                jlp.MXFP8BlockScaling(enable_2d_quantization=True),
                (jlp.MXFP8(), jlp.MXFP8(block=(32, 32)), jlp.MXFP8()),
            ),
            (jlp.Float8BlockScaling(), (Float8Block(), Float8Block(block=(128, 128)), Float8Block())),
            (
                jlp.Float8BlockScaling(fp8_format="HYBRID"),
                (Float8Block(), Float8Block(block=(128, 128)), Float8Block("e5m2")),
            ),
            (
                jlp.Float8BlockScaling(use_f32_scales=True),
                (
                    Float8Block(power_of_two=False),
                    Float8Block(block=(128, 128), power_of_two=False),
                    Float8Block(power_of_two=False),
                ),
            ),
            (
                jlp.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
                (Float8Block(block=(128, 128)), Float8Block(), Float8Block()),
            ),
            (
                jlp.Float8BlockScaling(w_block_scaling_dim=1, grad_block_scaling_dim=2),
                (Float8Block(), Float8Block(), Float8Block(block=(128, 128))),
            ),
            (jlp.Float8BlockScaling(w_block_scaling_dim=1), (Float8Block(),) * 3),
            (jlp.Float8CurrentScaling(), (Float8Tensor(), Float8Tensor(), Float8Tensor("e5m2"))),
            (jlp.Float8CurrentScaling(fp8_format="E4M3"), (Float8Tensor(),) * 3),
            (
                jlp.Float8CurrentScaling(use_power_2_scales=True),
                (Float8Tensor(power_of_two=True),) * 2 + (Float8Tensor("e5m2", power_of_two=True),),
            ),
            (jlp.DelayedScaling(), (Float8Tensor(), Float8Tensor(), Float8Tensor("e5m2"))),
            (jlp.DelayedScaling(fp8_format="E4M3"), (Float8Tensor(),) * 3),
        ],
        ids=str,
    )
    def test_formats(self, recipe, expected):
        assert formats(recipe) == expected
        roles = recipe.roles()
        assert all(r == Role(r.format) for r in (roles.input, roles.weight, roles.gradient))

    @pytest.mark.parametrize("cls", [jlp.Float8BlockScaling, jlp.Float8CurrentScaling])
    @pytest.mark.parametrize("operand", ["input", "weight", "gradient"])
    def test_each_quantisation_setting_reaches_its_operand_alone(self, cls, operand):
        field = {"input": "fp8_quant_fwd_inp", "weight": "fp8_quant_fwd_weight", "gradient": "fp8_quant_bwd_grad"}
        power = cls is jlp.Float8BlockScaling  # of the recipe's own scales
        default, roles = cls().roles(), cls(**{field[operand]: QParams(power, 2.0**-9)}).roles()
        for name in field:
            expected = getattr(default, name)
            if name == operand:
                expected = Role(dataclasses.replace(expected.format, amax_epsilon=2.0**-9))
            assert getattr(roles, name) == expected

    def test_one_operands_scales_may_be_powers_of_two(self):
        roles = jlp.Float8CurrentScaling(fp8_quant_fwd_weight=QParams(power_2_scale=True)).roles()
        assert (roles.input.format.power_of_two, roles.weight.format.power_of_two) == (False, True)

    def test_gradients_round_stochastically_and_rotate(self):
        rotated = QParams(random_hadamard_transform=True)
        gradient = QParams(random_hadamard_transform=True, stochastic_rounding=True)
        roles = jlp.Float8CurrentScaling(fp8_quant_fwd_inp=rotated, fp8_quant_bwd_grad=gradient).roles()
        assert roles.input == Role(Float8Tensor(), hadamard=jlp.Hadamard())
        assert roles.weight == Role(Float8Tensor())
        assert roles.gradient == Role(Float8Tensor("e5m2"), "stochastic", jlp.Hadamard())


class TestEnvironment:
    @pytest.mark.parametrize("variable", FLAGS)
    def test_flags(self, monkeypatch, variable):
        cls, field = FLAGS[variable]
        for value, meaning in (("1", True), ("yes", True), ("0", False), ("", False)):
            monkeypatch.setenv(variable, value)
            assert getattr(cls(), field) is meaning
            assert getattr(cls(**{field: not meaning}), field) is not meaning  # an argument comes first
        monkeypatch.setenv(variable, "2")
        with pytest.raises(ValueError, match=f"{variable}='2'; needs 0 or 1"):
            cls()

    @each_class
    def test_backward_override(self, monkeypatch, cls):
        for value in ("high_precision", "dequantized"):
            monkeypatch.setenv(OVERRIDE, value)
            assert cls().backward_override == (None if cls is jlp.DelayedScaling else value)
            assert cls(backward_override=None).backward_override is None
        monkeypatch.setenv(OVERRIDE, "")
        assert cls().backward_override is None


ROTATED, STOCHASTIC = QParams(random_hadamard_transform=True), QParams(stochastic_rounding=True)
LOOSE = MMParams(use_split_accumulator=False)
EVERY = [
    ({"fp8_format": "E5M2"}, ValueError, '"E5M2"; no GEMM takes E5M2 x E5M2: use "E4M3", or "HYBRID"'),
    ({"fp8_format": "hybrid"}, ValueError, 'fp8_format=\'hybrid\'; needs "E4M3" or "HYBRID"'),
    ({"fp8_format": None}, ValueError, 'fp8_format=None; needs "E4M3" or "HYBRID"'),
    ({"fp8_dpa": True}, NotImplementedError, "fp8_dpa=True; attention is not quantised here: leave it False"),
    ({"fp8_mha": True}, NotImplementedError, "fp8_mha=True; attention is not quantised here: leave it False"),
    ({"fp8_dpa": 0}, TypeError, "fp8_dpa=0; needs True or False"),
    ({"backward_override": "bf16"}, ValueError, "backward_override='bf16'; needs None or \"high_precision\""),
]
WRONG = {
    jlp.MXFP8BlockScaling: [
        ({"margin": 1}, ValueError, "margin=1; block scales have no margin: leave it 0"),
        ({"enable_2d_quantization": 1}, TypeError, "enable_2d_quantization=1; needs True or False"),
    ],
    jlp.Float8BlockScaling: [
        ({"use_f32_scales": "yes"}, TypeError, "use_f32_scales='yes'; needs True or False"),
        ({"x_block_scaling_dim": 3}, ValueError, "x_block_scaling_dim=3; needs 1 or 2"),
        ({"w_block_scaling_dim": True}, ValueError, "w_block_scaling_dim=True; needs 1 or 2"),
        ({"grad_block_scaling_dim": 0}, ValueError, "grad_block_scaling_dim=0; needs 1 or 2"),
        (
            {"x_block_scaling_dim": 2},
            ValueError,
            "x_block_scaling_dim and w_block_scaling_dim are 2; no GEMM takes 128x128 blocks on both sides: use 1",
        ),
        ({"grad_block_scaling_dim": 2}, ValueError, "w_block_scaling_dim and grad_block_scaling_dim are 2"),
        (
            {"x_block_scaling_dim": 2, "w_block_scaling_dim": 1, "grad_block_scaling_dim": 2},
            ValueError,
            "x_block_scaling_dim and grad_block_scaling_dim are 2",
        ),
        ({"fp8_gemm_fprop": LOOSE}, ValueError, "fp8_gemm_fprop has use_split_accumulator=False; it is always on"),
        ({"fp8_gemm_dgrad": LOOSE}, ValueError, "fp8_gemm_dgrad has use_split_accumulator=False"),
        ({"fp8_gemm_wgrad": LOOSE}, ValueError, "fp8_gemm_wgrad has use_split_accumulator=False"),
        ({"fp8_quant_fwd_inp": QParams()}, ValueError, "fp8_quant_* differ in power_2_scale; operands of a GEMM must"),
    ],
    jlp.Float8CurrentScaling: [
        ({"use_power_2_scales": 1}, TypeError, "use_power_2_scales=1; needs True or False"),
    ],
    jlp.DelayedScaling: [
        ({"margin": 0.5}, ValueError, "margin=0.5; needs an int"),
        ({"margin": True}, ValueError, "margin=True; needs an int"),
        *(({"margin": m}, ValueError, f"margin={m}; needs an int from -112 to 134") for m in (-(10**30), -113, 135)),
        ({"amax_history_len": 2**20 + 1}, ValueError, "amax_history_len=1048577; needs an int from 1 to 1048576"),
        ({"amax_history_len": 0}, ValueError, "amax_history_len=0; needs an int from 1 to"),
        ({"amax_history_len": 16.0}, ValueError, "amax_history_len=16.0; needs an int from 1 to"),
        ({"amax_compute_algo": "mean"}, ValueError, 'amax_compute_algo=\'mean\'; needs "max" or "most_recent"'),
        ({"amax_compute_algo": max}, ValueError, 'needs "max" or "most_recent"'),
        ({"scaling_factor_compute_algo": max}, NotImplementedError, "scaling_factor_compute_algo is fixed here"),
        ({"reduce_amax": False}, NotImplementedError, "reduce_amax=False; amaxes are of whole arrays: True"),
        ({"backward_override": "dequantized"}, ValueError, "backward_override='dequantized'; needs None"),
    ],
}
GEMM_SETTINGS = [
    ({"fp8_gemm_fprop": True}, TypeError, "fp8_gemm_fprop=True; needs a jaxlowprec.MMParams"),
    ({"fp8_gemm_wgrad": None}, TypeError, "fp8_gemm_wgrad=None; needs a jaxlowprec.MMParams"),
    ({"fp8_quant_fwd_inp": {}}, TypeError, "fp8_quant_fwd_inp={}; needs a jaxlowprec.QParams or None"),
    (
        {"fp8_quant_fwd_inp": STOCHASTIC},
        ValueError,
        "fp8_quant_fwd_inp has stochastic_rounding=True; it is only for grad",
    ),
    ({"fp8_quant_fwd_weight": STOCHASTIC}, ValueError, "fp8_quant_fwd_weight has stochastic_rounding=True"),
    ({"fp8_quant_fwd_weight": ROTATED}, ValueError, "transform of input, weight and gradient is False, True, False"),
    ({"fp8_quant_bwd_grad": ROTATED}, ValueError, "set it for input and gradient, or for none"),
    ({"fp8_quant_fwd_inp": ROTATED}, ValueError, "is True, False, False; it cancels in wgrad"),
]
CASES = [(cls, *case) for cls, own in WRONG.items() for case in EVERY + own] + [
    (cls, *case) for cls in (jlp.Float8BlockScaling, jlp.Float8CurrentScaling) for case in GEMM_SETTINGS
]


@pytest.mark.parametrize(("cls", "fields", "error", "message"), CASES)
def test_a_field_without_effect_is_refused_with_a_remedy(cls, fields, error, message):
    with pytest.raises(error, match=f"^{cls.__name__}: .*{re.escape(message)}"):
        cls(**fields)


@each_class
def test_an_unknown_field_raises(cls):
    with pytest.raises(TypeError, match="fp4_format"):
        cls(fp4_format="E2M1")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (lambda: QParams(power_2_scale=1), "QParams: power_2_scale=1; needs True or False"),
        (lambda: QParams(random_hadamard_transform="no"), "QParams: random_hadamard_transform='no'; needs"),
        (lambda: QParams(stochastic_rounding=None), "QParams: stochastic_rounding=None; needs"),
        (lambda: QParams(amax_epsilon=-1.0), "QParams: amax_epsilon=-1.0; needs a finite number, 0 or more"),
        (lambda: QParams(amax_epsilon=float("nan")), "QParams: amax_epsilon=nan"),
        (lambda: MMParams(0), "MMParams: use_split_accumulator=0; needs True or False"),
    ],
)
def test_settings_are_checked_when_they_are_made(settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        settings()
