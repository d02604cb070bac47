"""The text that a checkpoint is calibrated by, as rows of tokens."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np

from jaxlowprec.checkpoints.decoders.tokens import encoded_file, tokens_of
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.models.decoder.config import DecoderConfig

_HELD_OUT = 10  # one of so many tokens, the last ones of the text
_MOST_HELD_OUT = 32  # rows


@dataclasses.dataclass(frozen=True)
class Rows:
    """Tokens: int32 [rows, context] to calibrate by, and [rows, context + 1] to measure the perplexity by."""

    calibrating: np.ndarray
    held_out: np.ndarray


def rows_of(text: pathlib.Path, folder: pathlib.Path, config: DecoderConfig, *, rows: int, context: int) -> Rows:
    """A text as tokens of a model folder.

    Arguments:
        text: a UTF-8 file.
        folder: the model's.
        config: the model's.
        rows, context: see `Calibration`.

    Raises:
        CheckpointError: there is no tokenizer, or the text cannot be read, is too short, or has tokens that the model
            lacks.
    """
    context = min(context, config.longest)
    try:
        tokens = tokens_of(folder, config.vocabulary)
        found = encoded_file(text, tokens, config.vocabulary, 1)
    except ValueError as error:
        raise CheckpointError(f"calibration: {error}") from None
    last = len(found) // _HELD_OUT
    if last < context + 1:
        raise CheckpointError(
            f"calibration: {text} has {len(found)} tokens; needs {_HELD_OUT * (context + 1)} or more for "
            f"rows of {context}: a longer text, or a smaller context"
        )
    ours, held_out = found[:-last], found[-last:]
    count = min(rows, len(ours) // context)
    begins = np.linspace(0, len(ours) - context, count).astype(int)
    others = [held_out[i : i + context + 1] for i in range(0, len(held_out) - context, context)]
    return Rows(np.stack([ours[b : b + context] for b in begins]), np.stack(others[:_MOST_HELD_OUT]))
