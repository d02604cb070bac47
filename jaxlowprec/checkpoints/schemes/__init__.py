"""Published formats of quantised weights: one frozen `Scheme` each."""

from jaxlowprec.checkpoints.schemes.base import Scheme
from jaxlowprec.checkpoints.schemes.mixed import ConfigGroup, Mixed
from jaxlowprec.checkpoints.schemes.recognise import detect, from_config
from jaxlowprec.checkpoints.schemes.registry import NAMES, by_name

__all__ = ["NAMES", "ConfigGroup", "Mixed", "Scheme", "by_name", "detect", "from_config"]
