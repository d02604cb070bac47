"""The `implementation=` argument of every op."""

from __future__ import annotations

from typing import Any, Literal

from jaxlowprec.arguments import one_of
from jaxlowprec.wiring import native

Implementation = Literal["ffi", "reference"] | None


def check_implementation(who: str, implementation: Any) -> None:
    """Raises ValueError unless it is None, "ffi" or "reference"."""
    one_of(who, "implementation", implementation, None, "ffi", "reference")


def choose(who: str, implementation: Implementation) -> dict[str, Any]:
    """The arguments of `wiring.define` for an implementation.

    None is the native kernel where there is one, else the reference. "ffi" demands the kernel, "reference" pure JAX.
    """
    check_implementation(who, implementation)
    platforms = native.platforms()
    if implementation is None:
        return {"platforms": platforms}
    if implementation == "reference":
        return {"platforms": ()}
    if not platforms:
        raise NotImplementedError(f'{who}: implementation="ffi": {native.library().reason}')
    return {"platforms": platforms, "only_native": True, "missing": native.library().missing}
