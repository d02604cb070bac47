"""One thing that reads what somebody else wrote."""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Target:
    """What is attacked, and how.

    Attributes:
        run: of a case's bytes and a folder that the worker's cases share; returns what was accepted or raises.
            What was accepted and must not have been is an AssertionError.
        seeds: well-formed cases.
        refusals: the errors that say what is wrong with a case.
        changed: of a `mutation.Mutator` and bytes: the target's own way to change a case; None: JSON or bytes.
    """

    run: Callable
    seeds: Callable
    refusals: tuple[type[Exception], ...]
    changed: Callable | None = None
