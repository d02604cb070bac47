"""Text as a model's tokens, by the folder's tokenizer or as bytes, and the rows that a checkpoint is calibrated by."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.models.decoder.config import DecoderConfig

TOKENIZER = "tokenizer.json"

_HELD_OUT = 10  # one of so many tokens, the last ones of the text
_MOST_HELD_OUT = 32  # rows


class Tokens(Protocol):
    """Text to tokens and back."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without those that begin or end one."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""


class Bytes:
    """A token for each byte of UTF-8."""

    def encode(self, text: str) -> list[int]:
        """The bytes."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Bytes that are not UTF-8 become replacement characters."""
        return bytes(tokens).decode(errors="replace")


class FromFile:
    """The tokenizer of a tokenizer.json."""

    def __init__(self, file: pathlib.Path):
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_file(str(file))

    def encode(self, text: str) -> list[int]:
        """The tokens, without special ones."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text, without special tokens."""
        return self._tokenizer.decode(list(tokens))


def tokens_of(folder: pathlib.Path, vocabulary: int) -> Tokens:
    """The tokenizer of a model folder.

    Raises:
        ValueError: there is none and the vocabulary is not that of bytes, it cannot be read, or a package is missing.
    """
    file = folder / TOKENIZER
    if not file.exists():
        if vocabulary != 256:
            raise ValueError(
                f"{folder}: has no {TOKENIZER}, and its vocabulary of {vocabulary} is not that of bytes, 256; put the "
                "model's tokenizer there (transformers: AutoTokenizer.from_pretrained(...).save_pretrained(folder))"
            )
        return Bytes()
    try:
        return FromFile(file)
    except ImportError:
        raise ValueError(f"{file}: needs the package tokenizers: pip install tokenizers") from None
    except Exception as error:  # tokenizers raises plain Exceptions
        raise ValueError(f"{file}: {error}; needs a file of the package tokenizers") from None


def encoded_file(file: pathlib.Path, tokens: Tokens, vocabulary: int, least: int) -> np.ndarray:
    """The tokens of a text file, int32.

    Raises:
        ValueError: it is not UTF-8, is too short, or has tokens that the model lacks.
    """
    if file.exists() and not (file.is_file() or file.is_dir()):  # a pipe waits for its writer, and a device has no end
        raise ValueError(f"{file}: is a pipe or a device; needs a text file in UTF-8")
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}; needs a text file in UTF-8") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: {error}; needs a text file in UTF-8") from None
    found = np.asarray(tokens.encode(text), np.int32)
    if found.size < least:
        raise ValueError(
            f"{file}: has {found.size} tokens; needs {least} or more: a longer text, or a smaller --context"
        )
    if found.max() >= vocabulary:
        raise ValueError(
            f"{file}: the tokenizer gives token {found.max()}, but the model's vocabulary is {vocabulary}; needs the "
            "tokenizer of this model"
        )
    return found


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
