"""What a conversion needs of a calibration, which computes the model (`checkpoints.calibration`)."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jaxlowprec.checkpoints.conversion.plan import Plan
from jaxlowprec.checkpoints.files.folder import CheckpointFolder


@dataclasses.dataclass(frozen=True)
class Calibrated:
    """What a calibration found.

    Attributes:
        perplexity_before, perplexity_after: of the source and of the quantised model, on text that it was not
            calibrated by.
        calibration_tokens: the number of tokens that it was calibrated by.
        held_out_tokens: the number of tokens that they were measured on.
        layer_errors: for each layer, the norm of the change of its result over that of the result, by what it reads
            behind the quantised layers before it.
        weight_errors: for each module, the same of its linear, by the inputs that it was calibrated by.
        without_inputs: modules quantised by their weights alone: those outside of layers, and experts that no token of
            the text was sent to.
    """

    perplexity_before: float
    perplexity_after: float
    calibration_tokens: int
    held_out_tokens: int
    layer_errors: Sequence[float]
    weight_errors: Mapping[str, float]
    without_inputs: Sequence[str]


class Prepared(Protocol):
    """A calibration of one checkpoint, whose arguments were checked."""

    @property
    def options(self) -> dict[str, Any]:
        """What says whether two calibrations give the same bytes, for JSON."""

    def choose(
        self, plan: Plan, source: CheckpointFolder, destination: pathlib.Path, done: Callable[[int], None]
    ) -> tuple[Plan, Calibrated]:
        """The plan with the tensors that were chosen. They may lie in the destination under temporary names.

        Arguments:
            plan: of the conversion.
            source: what is converted.
            destination: the claimed folder.
            done: called with the bytes of the source that were calibrated.
        """


class Calibrating(Protocol):
    """How checkpoints are calibrated."""

    def prepare(self, plan: Plan, source: CheckpointFolder) -> Prepared:
        """Checks that this plan can be calibrated. Raises CheckpointError if not."""
