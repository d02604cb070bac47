"""An installed jaxlowprec works: its kernels are there, give the reference's bytes, and train a layer."""

import importlib.metadata
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec.wiring import native

library = native.library()
assert library.module, f"the native library was not loaded: {library.reason}"
assert "site-packages" in jlp.__file__, f"this tests {jlp.__file__}, not what was installed"

x = jax.random.normal(jax.random.key(0), (64, 256), jnp.bfloat16)
for fmt in (jlp.NVFP4(), jlp.MXFP8(), jlp.MXFP4(), jlp.Float8Block(), jlp.Float8Tensor(), jlp.Int4()):
    ours, reference = (jlp.quantize(x, fmt, implementation=how) for how in ("ffi", "reference"))
    for mine, wanted in ((ours.data, reference.data), (ours.scale, reference.scale)):
        assert np.asarray(mine).tobytes() == np.asarray(wanted).tobytes(), fmt
    if not isinstance(fmt, jlp.Int4):
        assert jnp.isfinite(jlp.scaled_matmul(ours, ours).astype(jnp.float32)).all(), fmt

layer = jlp.nnx.Linear(256, 64, rngs=nnx.Rngs(0))
with jlp.autocast(jlp.NVFP4BlockScaling()):
    loss, gradients = nnx.value_and_grad(lambda layer: jnp.mean(layer(x).astype(jnp.float32) ** 2))(layer)
assert jnp.isfinite(loss) and jnp.abs(gradients.kernel.get_value()).max() > 0
version = importlib.metadata.version("jaxlowprec")
print(f"jaxlowprec {version} works: Python {sys.version.split()[0]}, jax {jax.__version__}, {native.isa()}")
