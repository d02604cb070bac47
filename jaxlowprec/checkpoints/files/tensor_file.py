"""What readers of files of tensors share: a checked header, tensors by name, and closing."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, Self, TypeVar

from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.file_bytes import OpenFile

Entry = TypeVar("Entry")
Entry_co = TypeVar("Entry_co", covariant=True)


class Header(Protocol[Entry_co]):
    """What a header has at least: where each tensor is."""

    @property
    def tensors(self) -> Mapping[str, Entry_co]:
        """The entries by the tensors' names."""


H = TypeVar("H", bound="Header")


class TensorFile(Generic[Entry, H]):
    """A file of tensors, open for reading. Use it as a context manager, or close it.

    Arguments:
        path: the file.
        read_header: reads and checks the header of the open file.
    """

    def __init__(self, path: str | os.PathLike[str], read_header: Callable[[OpenFile], H]):
        self.path = pathlib.Path(path)
        self._file = OpenFile.to_read(self.path)
        try:
            self.header = read_header(self._file)
        except BaseException:
            self.close()
            raise

    def _entry(self, name: str) -> Entry:
        try:
            return self.header.tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: no tensor {name!r}") from None

    def close(self) -> None:
        """Closes the file; arrays that were read stay valid."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
