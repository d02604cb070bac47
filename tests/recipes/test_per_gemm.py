"""PerGemm, `Roles` by GEMM and answers of `Custom` by GEMM: what they say, and the mistakes that they name."""

import re

import pytest
from flax import nnx

import jaxlowprec as jlp

NVFP4, MXFP8 = jlp.NVFP4BlockScaling(), jlp.MXFP8BlockScaling()


class TestCustom:
    def test_none_in_a_dict_keeps_that_gemm_in_high_precision(self):
        def factory(role):
            return {"fprop": jlp.MXFP8(), "dgrad": None} if role.tensor_type == "weight" else jlp.MXFP8()

        roles, both = jlp.Custom(factory).roles(), (jlp.Role(jlp.MXFP8()),) * 2
        assert (roles.fprop, roles.dgrad, roles.wgrad) == (both, "high_precision", both)

    @pytest.mark.parametrize("answer", [{"fprop": jlp.MXFP8()}, {"fprop": None, "dgrad": None, "wgrad": None}, {}])
    def test_a_dict_has_the_gemms_of_its_tensor(self, answer):
        with pytest.raises(TypeError, match="'weight'.*; a dict needs the keys 'fprop' and 'dgrad'"):
            jlp.Custom(lambda role: answer if role.tensor_type == "weight" else None).roles()


class TestBackwardOverride:
    def test_of_a_recipe_holds_for_its_own_gemm(self):
        high, read = (jlp.MXFP8BlockScaling(backward_override=o) for o in ("high_precision", "dequantized"))
        assert jlp.PerGemm(NVFP4, high, read).roles() == jlp.PerGemm(NVFP4, None, "dequantized").roles()
        assert jlp.PerGemm(read, read, read).roles().dgrad == "dequantized"

    def test_of_fprop_contradicts_a_quantised_gradient(self):
        with pytest.raises(ValueError, match="recipe of fprop has backward_override='dequantized', but wgrad would be"):
            jlp.PerGemm(jlp.MXFP8BlockScaling(backward_override="dequantized"), None, NVFP4)


class TestExplain:
    def test_says_what_each_gemm_has(self):
        model = jlp.nnx.Linear(64, 48, rngs=nnx.Rngs(0))
        explained = jlp.explain(model, jlp.PerGemm(NVFP4, "dequantized", MXFP8))
        assert re.split("  +", str(explained).splitlines()[1]) == [
            "(model)",
            "64x48",
            "fprop NVFP4 16x16, dgrad decoded",
            "fprop NVFP4 1x16, wgrad MXFP8 E4M3 1x32",
            "dgrad -, wgrad MXFP8 E4M3 1x32",
        ]
        assert explained.formats == {"": jlp.NVFP4((16, 16))}

    def test_supported_names_each_gemm(self):
        found = jlp.supported(jlp.PerGemm(NVFP4, MXFP8, None))
        assert found.supported and all(text in found.reason for text in ("fprop NVFP4", "dgrad MXFP8", "wgrad in high"))


class TestRecipe:
    def test_is_part_of_a_policy_by_layer(self):
        mixed = jlp.PerGemm(NVFP4, MXFP8)
        recipe = jlp.PerLayer(((".*head", None),), default=mixed)
        assert recipe.at("up") == mixed and recipe.at("head") is None
        assert hash(mixed) == hash(jlp.PerGemm(NVFP4, MXFP8))

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({}, ValueError, "no GEMM has a recipe, so nothing would be quantised; needs one for fprop"),
            ({"dgrad": "dequantized"}, ValueError, "no GEMM has a recipe"),
            ({"fprop": "dequantized"}, TypeError, "fprop='dequantized'; needs a recipe such as .*, None for"),
            ({"wgrad": jlp.MXFP8()}, TypeError, 'wgrad=MXFP8.*; needs a recipe such as .* or "dequantized"'),
            ({"fprop": NVFP4, "dgrad": "mxfp8"}, TypeError, "dgrad='mxfp8'; needs a recipe"),
            ({"fprop": jlp.DelayedScaling()}, ValueError, "amax histories of delayed scaling .*: use Float8CurrentSc"),
            ({"fprop": jlp.Int4QAT()}, ValueError, "quantisation-aware training is a recipe for all three GEMMs"),
            ({"wgrad": jlp.PerLayer((), NVFP4)}, ValueError, "put PerGemm into the rules of PerLayer"),
        ],
    )
    def test_names_the_mistake(self, arguments, error, message):
        with pytest.raises(error, match=f"PerGemm: .*{message}"):
            jlp.PerGemm(**arguments)

    @pytest.mark.parametrize(
        ("fields", "error", "message"),
        [
            ({"fprop": "dequantized"}, TypeError, "Roles: fprop='dequantized'; needs a pair of .*Role, for input and"),
            ({"wgrad": (jlp.Role(jlp.MXFP8()), None)}, TypeError, "Roles: wgrad=.*; needs a pair"),
            ({"dgrad": "high_precision", "ste": "identity"}, ValueError, "Roles: dgrad and ste are given"),
        ],
    )
    def test_roles_name_the_mistake(self, fields, error, message):
        with pytest.raises(error, match=message):
            jlp.Roles(None, None, None, **fields)
