"""Schemes as they are written in a manifest, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxlowprec.checkpoints.errors import brief
from jaxlowprec.checkpoints.schemes import by_name
from jaxlowprec.checkpoints.schemes.base import Scheme
from jaxlowprec.checkpoints.schemes.mixed import ConfigGroup, Mixed


def described(scheme: Scheme) -> dict[str, Any]:
    """A scheme as JSON: `{"name": ..., **options}`; of a `Mixed` its groups, each with its targets and its scheme.

    >>> from jaxlowprec.checkpoints.schemes import by_name
    >>> described(by_name("w4a16", group_size=32))
    {'name': 'w4a16', 'group_size': 32, 'scale_dtype': 'bfloat16'}
    """
    if not isinstance(scheme, Mixed):
        return {"name": scheme.name, **dataclasses.asdict(scheme)}
    groups = [{"targets": list(group.targets), "scheme": described(group.scheme)} for group in scheme.groups]
    return {"name": scheme.name, "groups": groups}


def scheme_of(described: Mapping[str, Any]) -> Scheme:
    """The inverse of `described`.

    Raises:
        ValueError: it does not describe a scheme.

    >>> scheme_of({"name": "nvfp4"}).name
    'nvfp4'
    """
    if described.get("name") != Mixed.name:
        return _by_name(described)
    groups = described.get("groups")
    if set(described) != {"name", "groups"} or not isinstance(groups, list):
        raise _unknown(described, "needs name and groups, a list")
    return Mixed(tuple(_group(group) for group in groups))


def _group(described: Any) -> ConfigGroup:
    if not isinstance(described, Mapping) or set(described) != {"targets", "scheme"}:
        raise _unknown(described, "needs targets and scheme")
    targets, scheme = described["targets"], described["scheme"]
    if not isinstance(targets, list) or not isinstance(scheme, Mapping):
        raise _unknown(described, "targets must be a list, scheme an object")
    return ConfigGroup(tuple(targets), _by_name(scheme))


def _by_name(described: Mapping[str, Any]) -> Scheme:
    try:
        return by_name(**described)
    except TypeError as error:
        raise _unknown(described, str(error)) from None


def _unknown(described: Any, why: str) -> ValueError:
    given = dict(described) if isinstance(described, Mapping) else described
    return ValueError(f"{brief(given)} does not describe a known scheme: {why}")
