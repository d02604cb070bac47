"""Codes and scales of weights chosen by what a model computes from a text, instead of by the weights alone.

>>> from jaxlowprec.checkpoints.calibration import Calibration
>>> Calibration("text.txt", rows=32).context
512
"""

from jaxlowprec.checkpoints.calibration.calibrate import Calibration
from jaxlowprec.checkpoints.calibration.feedback import Method

__all__ = ["Calibration", "Method"]
