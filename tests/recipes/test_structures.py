"""Which structure a layer's program has under each recipe that tests run with, and which formats its operands have."""

from tests.helpers import format_name
from tests.low_precision import RECIPES, STRUCTURES, structure_of

ROTATED_NVFP4 = ("NVFP4-1x16, rotated", "NVFP4-16x16", "NVFP4-1x16, stochastic, rotated")
KNOWN = {  # the structure; formats of the input, the weight and the gradient
    "bf16": ("high precision", None, None, None),
    "nvfp4": ("amaxes, then three GEMMs", *ROTATED_NVFP4),
    "nvfp4 row-scaled": ("forward with roles of its own", *ROTATED_NVFP4),
    "mxfp8": ("three GEMMs", "MXFP8-E4M3-1x32", "MXFP8-E4M3-1x32", "MXFP8-E4M3-1x32"),
    "fp8_block": ("three GEMMs", "Float8Block-E4M3-1x128", "Float8Block-E4M3-128x128", "Float8Block-E4M3-1x128"),
    "fp8_current": ("amaxes, then three GEMMs", "Float8Tensor-E4M3", "Float8Tensor-E4M3", "Float8Tensor-E5M2"),
    "fp8_delayed": ("delayed scaling", "Float8Tensor-E4M3", "Float8Tensor-E4M3", "Float8Tensor-E5M2"),
    "mxfp8 hybrid 2d": ("three GEMMs", "MXFP8-E4M3-1x32", "MXFP8-E4M3-32x32", "MXFP8-E5M2-1x32"),
    "fp8_block hybrid float32 scales": (
        "three GEMMs",
        "Float8Block-E4M3-1x128-power_of_two=False",
        "Float8Block-E4M3-128x128-power_of_two=False",
        "Float8Block-E5M2-1x128-power_of_two=False",
    ),
    "fp8_block input 2d": (
        "three GEMMs",
        "Float8Block-E4M3-128x128",
        "Float8Block-E4M3-1x128",
        "Float8Block-E4M3-1x128",
    ),
    "fp8_block gradient 2d": (
        "three GEMMs",
        "Float8Block-E4M3-1x128",
        "Float8Block-E4M3-1x128",
        "Float8Block-E4M3-128x128",
    ),
    "fp8_current powers of two": (
        "amaxes, then three GEMMs",
        "Float8Tensor-E4M3-power_of_two=True",
        "Float8Tensor-E4M3-power_of_two=True",
        "Float8Tensor-E4M3-power_of_two=True",
    ),
    "fp8_current rotated stochastic": (
        "amaxes, then three GEMMs",
        "Float8Tensor-E4M3, rotated",
        "Float8Tensor-E4M3",
        "Float8Tensor-E5M2, stochastic, rotated",
    ),
    "fp8_delayed margin": ("delayed scaling", "Float8Tensor-E4M3", "Float8Tensor-E4M3", "Float8Tensor-E4M3"),
    "mxfp4 weight": ("three GEMMs", "MXFP8-E4M3-1x32", "MXFP4-1x32", "MXFP8-E4M3-1x32"),
    "mxfp4": ("three GEMMs", "MXFP4-1x32", "MXFP4-1x32", "MXFP4-1x32"),
    "mxfp8 hybrid": ("three GEMMs", "MXFP8-E4M3-1x32", "MXFP8-E4M3-1x32", "MXFP8-E5M2-1x32"),
    "int4_qat": ("weight only", None, "Int4-1x16-group_size=16", None),
    "int4_qat clipped": ("weight only", None, "Int4-1x16-asymmetric-group_size=16-symmetric=False", None),
    "nvfp4_qat": ("weight only, served in bfloat16", None, "NVFP4-1x16", None),
    "nvfp4_qat 2d": ("weight only, served in bfloat16", None, "NVFP4-16x16", None),
    "nvfp4 four over six": (
        "amaxes, then three GEMMs",
        "NVFP4-1x16-four_over_six-scale_rule=four_over_six",
        "NVFP4-16x16-four_over_six-scale_rule=four_over_six",
        "NVFP4-1x16, stochastic",
    ),
    "nvfp4_qat search": ("weight only, served in bfloat16", None, "NVFP4-1x16-search-scale_rule=search", None),
    "mxfp8_qat clipped": ("weight only, served in bfloat16", None, "MXFP8-E4M3-1x32-scale_rule=floor", None),
    "high precision forward": ("forward in high precision", *ROTATED_NVFP4),
    "high precision backward": ("backward high_precision", *ROTATED_NVFP4),
    "dequantized backward": ("backward dequantized", "MXFP8-E4M3-1x32", "MXFP8-E4M3-1x32", "MXFP8-E4M3-1x32"),
    "dgrad only": ("dgrad only", None, None, None),  # of GEMMs, not of tensors: MXFP8 of the weight and the gradient
}


def said(role):
    if role is None:
        return None
    rounding, rotation = [role.rounding] * (role.rounding != "nearest"), ["rotated"] * (role.hadamard is not None)
    return ", ".join([format_name(role.format), *rounding, *rotation])


def test_every_recipe_is_known_with_its_structure_and_formats():
    found = {}
    for name, recipe in RECIPES.items():
        roles = None if recipe is None else recipe.roles()
        found[name] = structure_of(recipe), *(said(getattr(roles, of, None)) for of in ("input", "weight", "gradient"))
    assert found == KNOWN


def test_each_structure_has_its_recipe():
    """One each."""
    assert sorted(map(structure_of, STRUCTURES.values())) == sorted({structure for structure, *_ in KNOWN.values()})
