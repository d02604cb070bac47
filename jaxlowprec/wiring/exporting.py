"""What `jax.export` has to be told of this library's kernels."""

from __future__ import annotations

from typing import Any

import jax.export

from jaxlowprec.wiring import native


def disabled_checks() -> list[Any]:
    """The names of this library's kernels, for `jax.export.export(function, disabled_checks=...)`.

    JAX refuses to write custom calls into a file, since it cannot promise that they will be there, or mean the same,
    where the file is read. With these it writes those of jaxlowprec: read the file with the version that wrote it.

    Returns:
        One `jax.export.DisabledSafetyCheck` for each kernel of this build, of CPUs and GPUs; none where there is no
        compiled library: programs then contain no custom calls.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> x, w = jnp.ones((16, 64)), jnp.ones((64, 32))
    >>> serve = jax.jit(lambda x, w: jlp.linear(x, w, recipe=jlp.MXFP8BlockScaling()))
    >>> file = jax.export.export(serve, disabled_checks=jlp.disabled_checks())(x, w).serialize()
    >>> jax.export.deserialize(file).call(x, w).shape
    (16, 32)
    """
    module: Any = native.library().module
    if module is None:
        return []
    names = {*module.cpu_handlers(), *getattr(module, "cuda_handlers", dict)()}
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in sorted(names)]
