"""MX quantisation and the swizzle of its scales against torchao's, written apart from this library.

Where the rules are not shared, nothing is compared:
* "up" is torchao's RCEIL, which takes a float32 log2 and so loses what is within 2^-20 above a power of two. bfloat16
  amaxes, an eighth of whose bits are cut off, are never so near once they are divided by 448, 57344 or 6.
* torchao keeps the sign of -0. Its least exponent is 0, ours of a block that is not zero 1 (a normal float32): that
  shows in blocks below 2^-125 times the largest element. An infinite block's scale is 2^127 there, NaN here.
* A poisoned block's codes are zero here, and its own NaN and zeros there.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from tests.helpers import FLOAT8, as_bytes, format_name, random_array

torch = pytest.importorskip("torch", reason="torch is not installed: pip install jaxlowprec[oracles]")
mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="torchao is not installed")
from torchao.prototype.mx_formats.config import ScaleCalculationMode  # noqa: E402
from torchao.prototype.mx_formats.utils import to_blocked  # noqa: E402

MODES = {"up": ScaleCalculationMode.RCEIL, "floor": ScaleCalculationMode.FLOOR, "even": ScaleCalculationMode.EVEN}
ELEMENTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.float4_e2m1fn_x2}
FORMATS = [jlp.MXFP4(scale_rule=rule) for rule in MODES] + [
    jlp.MXFP8(element, scale_rule=rule) for element in FLOAT8 for rule in MODES
]
WITHOUT_LOGARITHM = [fmt for fmt in FORMATS if fmt.scale_rule != "up"]


def torch_of(x):
    return torch.from_numpy(np.asarray(x).astype(np.float32)).to(getattr(torch, x.dtype.name))


def torchao_bytes(x, fmt):
    scale, data = mx_tensor.to_mx(torch_of(x).contiguous(), ELEMENTS[fmt.element], 32, MODES[fmt.scale_rule])
    return data.view(torch.uint8).numpy(), scale.view(torch.uint8).numpy()


def assert_agrees(x, fmt):
    q, (data, scale) = jlp.quantize(x, fmt), torchao_bytes(x, fmt)
    np.testing.assert_array_equal(as_bytes(q.scale), scale)
    np.testing.assert_array_equal(as_bytes(q.data), data)


def without_negative_zeros(x):
    return jnp.where(x == 0, 0, x).astype(x.dtype)


@pytest.mark.parametrize("fmt", FORMATS, ids=format_name)
class TestBytes:
    @pytest.mark.parametrize("exponent", [-70, -10, 0, 10, 100])
    def test_magnitudes(self, fmt, exponent):
        x = jnp.ldexp(random_array((64, 256), "float32", seed=exponent + 100), exponent).astype("bfloat16")
        assert_agrees(without_negative_zeros(x), fmt)

    def test_every_mantissa_of_an_amax(self, fmt):
        """All bfloat16 numbers of four binades, each the largest of its block."""
        amax = jax.lax.bitcast_convert_type(jnp.arange(0x4000, 0x4200, dtype=jnp.uint16), jnp.bfloat16)
        rest = jnp.linspace(-1, 1, 31).astype(jnp.bfloat16)
        x = jnp.concatenate([amax[:, None], amax[:, None] * rest], axis=1)
        assert_agrees(without_negative_zeros(x), fmt)

    def test_zero_and_poisoned_blocks(self, fmt):
        x = random_array((8, 64), "float32").at[2].set(0.0).at[5, 40].set(jnp.nan).astype("bfloat16")
        q, (_, scale) = jlp.quantize(x, fmt), torchao_bytes(x, fmt)
        np.testing.assert_array_equal(as_bytes(q.scale), scale)
        assert scale[2].max() == 0 and scale[5].tolist()[1] == 255


@pytest.mark.parametrize("fmt", WITHOUT_LOGARITHM, ids=format_name)
def test_float32(fmt):
    assert_agrees(without_negative_zeros(random_array((64, 256), "float32", seed=3)), fmt)


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (130, 5), (300, 17)], ids=str)
def test_the_swizzle_is_torchaos(shape):
    scale = jnp.asarray(np.random.default_rng(0).integers(0, 256, shape), jnp.uint8)
    np.testing.assert_array_equal(jlp.layouts.swizzle(scale), to_blocked(torch.from_numpy(np.array(scale))).flatten())
