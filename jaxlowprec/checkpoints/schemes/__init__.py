"""Published formats of quantised weights: one frozen `Scheme` each."""

from jaxlowprec.checkpoints.schemes.base import Scheme
from jaxlowprec.checkpoints.schemes.mixed import ConfigGroup, Mixed
from jaxlowprec.checkpoints.schemes.recognise import NAMES, by_name, detect, from_config

__all__ = ["NAMES", "ConfigGroup", "Mixed", "Scheme", "by_name", "detect", "from_config"]
