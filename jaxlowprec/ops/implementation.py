"""The `implementation=` argument of every op."""

from __future__ import annotations

from typing import Any, Literal

from jaxlowprec.wiring import native

Implementation = Literal["ffi", "reference"] | None


def choose(who: str, implementation: Implementation) -> dict[str, Any]:
    """The arguments of `wiring.define` for an implementation.

    None is the native kernel where there is one, else the reference. "ffi" demands the kernel, "reference" pure JAX.
    """
    if implementation is None:
        return {"platforms": native.platforms()}
    if implementation == "reference":
        return {"platforms": ()}
    if implementation == "ffi":
        if not native.platforms():
            raise NotImplementedError(f'{who}: implementation="ffi": {native.library().reason}')
        return {"platforms": native.platforms(), "only_native": True, "missing": native.library().missing}
    raise ValueError(f'{who}: implementation={implementation!r}; needs None, "ffi" or "reference"')
