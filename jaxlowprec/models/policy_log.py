"""The file of a search for a policy: measurements, appended one by one, so that a search that was stopped goes on."""

from __future__ import annotations

import json
import math
import os
import pathlib
from typing import Any

from jaxlowprec.locks import held_elsewhere

_FORMAT = "jaxlowprec policy"


class Log:
    """Reads what the file has and appends to it, alone until it is closed; without a path it does nothing.

    Arguments:
        path: the file.
        about: what the measurements depend on; a file of other ones is refused.

    Raises:
        ValueError: the file is another one, is damaged, or another search writes it.
    """

    def __init__(self, path: str | os.PathLike[str] | None, about: dict[str, Any]):
        self._file: Any = None
        self._path = path
        self._found: dict[str, list[float]] = {}
        if path is None:
            return
        header = json.dumps({"format": _FORMAT, **about})
        file = pathlib.Path(path)
        if file.exists() and not file.is_file():  # reading a pipe would wait for its writer
            raise ValueError(f"find_policy: {path} is no file; give another path=")
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file.open("a+b")  # which changes nothing that is there
        try:
            if held_elsewhere(self._file.fileno()):
                raise ValueError(
                    f"find_policy: another search writes {path} now; wait until it has ended, or give another path="
                )
            self._continue(header)
        except BaseException:
            self._file.close()
            raise

    def _continue(self, header: str) -> None:
        """Reads the file, and cuts off an unfinished last line."""
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        lines = whole.decode("utf-8", "replace").split("\n")[:-1]
        if lines[:1] != [header] and not (not lines and header.encode().startswith(content)):
            raise ValueError(
                f"find_policy: {self._path} has the measurements of another search (layers, candidates, key), or is "
                "another file; give another path=, or delete it"
            )
        for number, line in enumerate(lines[1:], 2):
            place, values = _measurement(line, f"{self._path}:{number}")
            self._found[place] = values
        if len(whole) < len(content):
            self._file.truncate(len(whole))
        if not lines:
            self._write(header)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def get(self, *place: Any) -> list[float] | None:
        """The measurement of a place, or None."""
        return self._found.get(json.dumps(place))

    def put(self, *place_and_values: Any) -> None:
        """Appends what was measured: the last argument, at the place that the others say."""
        *place, values = place_and_values
        if self._file is not None:
            self._write(json.dumps([json.dumps(place), *values]))

    def check_reference(self, batch: int, values: list[float]) -> None:
        """Raises ValueError if this batch had another loss or gradient in high precision."""
        before = self.get("reference", batch)
        if before is None:
            self.put("reference", batch, values)
        elif not all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(before, values, strict=True)):
            raise ValueError(
                f"find_policy: {self._path} was measured with another model or other batches: batch {batch} had the "
                f"loss {before[0]:.6g}, and has {values[0]:.6g}; give another path="
            )

    def _write(self, line: str) -> None:
        self._file.write(line.encode() + b"\n")
        self._file.flush()


def _measurement(line: str, where: str) -> tuple[str, list[float]]:
    """A line's place and numbers. Raises ValueError, which names the line, if it is not what `put` writes."""
    try:
        place, *values = json.loads(line)
        count = 2 if json.loads(place)[0] == "reference" else 3
        if len(values) == count and all(type(value) in (int, float) for value in values):
            return place, [float(value) for value in values]
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        pass
    raise ValueError(f"find_policy: {where} is damaged; delete that line, or give another path=")
