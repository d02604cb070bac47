"""A run's record: a file of JSON lines that grows by a line for each recorded step.

    {"format": "jaxlowprec telemetry", "version": 1, "names": [...], "gemms": [...], "about": {"recipe": "nvfp4"}}
    {"step": 100, "time": 1763900000.0, "scalars": {"loss": 2.31}, "layers": {"blocks/0/up": {"input rowwise": [...]}},
     "changed": {"blocks/0/up": 0.02}}

Each line is written by one system call at the file's end. So a process that is killed loses at most the line that it
is writing, a reader sees whole lines while the run goes on, and two recorders of one file, as when a restart overlaps,
lose none. Vectors are those of `Statistics`, rounded to five digits, without the zeros at their end; a number that is
not finite is a string.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
import stat
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxlowprec.arguments import shown
from jaxlowprec.locks import alone
from jaxlowprec.ops.statistics.finish import LENGTH, SCALARS
from jaxlowprec.recipes.roles import GEMMS
from jaxlowprec.telemetry.measures import ERROR, NUMBERS, Statistics, of_gemm
from jaxlowprec.telemetry.probes import read, weight_codes
from jaxlowprec.telemetry.sampling import changed

FORMAT, VERSION = "jaxlowprec telemetry", 1
_WEIGHTS = ("weight rowwise", "weight columnwise")


class Recorder:
    """Appends what was measured to a run's file, which `load`, `jaxlowprec watch` and `jaxlowprec report` read.

    A file that is there already is continued, after its last whole line: after a restart give the same path.

        with jlp.telemetry.Recorder("runs/demo/telemetry.jsonl", every=100, recipe="nvfp4") as recorder:
            for step in range(steps):
                params, loss, found = train_step(params, batch, recorder.due(step))
                recorder.record(step, found, loss=loss)

    Arguments:
        path: the file; its folder is made. None: nothing is written, as by all processes of a run but the first.
        every: record each step that this divides.
        about: what the run is, for its report: numbers and texts by name, kept in the file's first line.

    Raises:
        ValueError: `every` is not positive, or what is there is no run's record.
        TypeError: `about` has something other than numbers and texts.
    """

    def __init__(self, path: str | os.PathLike[str] | None, every: int = 1, **about: Any):
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"telemetry.Recorder: every={shown(every)}; needs a positive int")
        for name, value in about.items():
            if not isinstance(value, str | int | float):
                raise TypeError(f"telemetry.Recorder: {name}={shown(value)}; needs a number or a text")
        self.path, self.every, self._file = None if path is None else pathlib.Path(path), every, -1
        self._codes: dict[str, np.ndarray] = {}
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            with alone(self._file):
                if _continued(self._file, self.path) == 0:
                    names = [*SCALARS, "codes", "scales", "outlier_channels", "channel_shares"]
                    self._append({"format": FORMAT, "version": VERSION, "names": names, "gemms": ERROR, "about": about})
        except BaseException:
            self.close()
            raise

    def due(self, step: Any) -> Any:
        """Whether a step is recorded: for `on=` of `value_and_grad` and `collecting`; of a traced number, too."""
        return step % self.every == 0

    def record(self, step: int, found: Mapping[str, Any] | None = None, **scalars: Any) -> None:
        """Appends a step if it is due; otherwise does nothing, and waits for no device.

        Arguments:
            step: its number.
            found: what `value_and_grad` found, or the gradient of the state of `collecting`.
            scalars: further numbers, such as the loss.

        Raises:
            TypeError, ValueError: the step is no whole number, a scalar no number, or `found` nothing of telemetry's.
        """
        step = _as(int, "step", step)
        if self.path is None or not self.due(step):
            return
        layers = {} if found is None else read(found)
        vectors = {
            layer: {tensor: _packed(tensor, s) for tensor, s in tensors.items()} for layer, tensors in layers.items()
        }
        numbers = {name: _number(_as(float, name, value)) for name, value in scalars.items()}
        line: dict[str, Any] = {"step": step, "time": round(time.time(), 3), "scalars": numbers, "layers": vectors}
        before, self._codes = self._codes, {} if found is None else weight_codes(found)
        if known := before.keys() & self._codes.keys():
            line["changed"] = {name: round(changed(before[name], self._codes[name]), 5) for name in sorted(known)}
        with alone(self._file):
            self._append(line)

    def close(self) -> None:
        """Closes the file; nothing is lost without it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _append(self, line: dict[str, Any]) -> None:
        data = (json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n").encode()
        while data:  # a disk that is full raises; anything else writes all at once
            data = data[os.write(self._file, data) :]


@dataclasses.dataclass(frozen=True)
class Record:
    """One recorded step.

    Attributes:
        step: its number.
        time: seconds since 1970.
        scalars: what the program gave, by name.
        layers: `Statistics` by layer and tensor.
        changed: by layer, the share of a sample of the weight's codes that is not what it was in the record before.
    """

    step: int
    time: float
    scalars: dict[str, float]
    layers: dict[str, dict[str, Statistics]]
    changed: dict[str, float] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def names(self) -> list[tuple[str, str]]:
        """Layer and tensor of each of its statistics."""
        return [(layer, tensor) for layer, tensors in self.layers.items() for tensor in tensors]

    @functools.cached_property
    def _table(self) -> np.ndarray:
        rows = [self.layers[layer][tensor].values for layer, tensor in self.names]
        return np.stack(rows) if rows else np.zeros((0, LENGTH))

    def of(self, names: list[tuple[str, str]]) -> Statistics:
        """Statistics of many tensors at once, float64 [len(names), LENGTH]; NaN of those that were not measured."""
        if names == self.names:
            return Statistics(self._table)
        place = {name: i for i, name in enumerate(self.names)}
        chosen = np.array([place.get(name, len(place)) for name in names], np.intp)
        return Statistics(np.vstack([self._table, np.full((1, LENGTH), np.nan)])[chosen])

    def changes(self, names: list[tuple[str, str]]) -> np.ndarray:
        """`changed` of many tensors, float64 [len(names)]; NaN of those that are no weights."""
        shares = [self.changed.get(layer, math.nan) if tensor in _WEIGHTS else math.nan for layer, tensor in names]
        return np.array(shares, np.float64)

    def flat(self) -> dict[str, float]:
        """All numbers under stable names, for TensorBoard, Weights & Biases and their like: `up/input rowwise/sqnr`."""
        found = dict(self.scalars)
        for layer, tensors in self.layers.items():
            for tensor, statistics in tensors.items():
                found |= {f"{layer}/{tensor}/{name}": value for name, value in statistics.scalars().items()}
        return found | {f"{layer}/weight/changed": value for layer, value in self.changed.items()}


@dataclasses.dataclass(frozen=True)
class Run:
    """A run's record.

    Attributes:
        path: its file.
        about: what its recorder was told.
        records: by step, ascending; of a step that was recorded twice, after a restart, the later one.
    """

    path: pathlib.Path
    about: dict[str, Any]
    records: list[Record]

    @property
    def steps(self) -> list[int]:
        """The recorded steps."""
        return [record.step for record in self.records]

    def series(self, layer: str, tensor: str, statistic: str) -> np.ndarray:
        """A statistic at each recorded step, float64; NaN where it was not measured. "changed" is one of weights."""

        def at(record: Record) -> float:
            if statistic == "changed":
                return float(record.changes([(layer, tensor)])[0])
            found = record.layers.get(layer, {}).get(tensor)
            return math.nan if found is None else float(getattr(found, statistic))

        return np.array([at(record) for record in self.records])

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Writes a table with a row for each step, layer and tensor, and a column for each statistic. Needs pyarrow.

        Weights have a column "changed", see `Record`. What is not known is null.
        """
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise ImportError("telemetry.Run.to_parquet: needs pyarrow; pip install 'jaxlowprec[parquet]'") from error
        rows = []
        for record in self.records:
            for layer, tensors in record.layers.items():
                for tensor, statistics in tensors.items():
                    shares = {"changed": record.changed.get(layer)} if tensor in _WEIGHTS else {}
                    numbers: Any = dict.fromkeys((*NUMBERS, "changed")) | statistics.scalars() | shares
                    rows.append({"step": record.step, "layer": layer, "tensor": tensor} | numbers)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def load(path: str | os.PathLike[str]) -> Run:
    """A run's record, as far as it is written: also of a run that is going on, or was killed.

    Arguments:
        path: the file of a `Recorder`, or its folder if the file has the name telemetry.jsonl.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no run's record, or one of a later version.
    """
    return RecordFollower(path).run()


class RecordFollower:
    """Reads a run's record again and again while it is written: each time what is new in it.

    Arguments:
        path: see `load`.
    """

    def __init__(self, path: str | os.PathLike[str]):
        file = pathlib.Path(path)
        self._path = file / "telemetry.jsonl" if file.is_dir() else file
        self._begin()

    def _begin(self) -> None:
        self._read, self._lines = 0, 0
        self._file: tuple[int, int] | None = None
        self._about: dict[str, Any] | None = None
        self._records: dict[int, Record] = {}

    def run(self) -> Run:
        """The run, as far as it is written. Raises as `load` does."""
        if self._path.exists() and not self._path.is_file():  # reading a pipe would wait for its writer
            raise _no_record(self._path)
        with self._path.open("rb") as file:
            found = os.fstat(file.fileno())
            if (found.st_dev, found.st_ino) != self._file or found.st_size < self._read:  # another file, or a new start
                self._begin()
                self._file = found.st_dev, found.st_ino
            file.seek(self._read)
            content = file.read()
        for line in _whole_lines(content):
            self._take(line)
        self._read += content.rfind(b"\n") + 1
        if self._about is None:
            raise _no_record(self._path)
        return Run(self._path, self._about, [self._records[step] for step in sorted(self._records)])

    def _take(self, line: bytes) -> None:
        self._lines += 1
        if self._about is None:
            self._about = _about(line, self._path)
            return
        record = _record(line, f"{self._path}:{self._lines}")
        self._records[record.step] = record


def _continued(file: int, path: pathlib.Path) -> int:
    """Cuts an unfinished last line off a file that is continued: its length."""
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise _no_record(path)
    content = path.read_bytes()
    length = content.rfind(b"\n") + 1
    if length:
        _about(next(_whole_lines(content)), path)
    elif content and not f'{{"format":"{FORMAT}"'.encode().startswith(content[:20]):
        raise _no_record(path)
    if length < len(content):
        os.ftruncate(file, length)
    return length


def _whole_lines(content: bytes) -> Iterator[bytes]:
    yield from content[: content.rfind(b"\n") + 1].splitlines()


def _about(line: bytes, path: pathlib.Path) -> dict[str, Any]:
    """The description of the run in the file's first line."""
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        raise _no_record(path) from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise _no_record(path)
    if header.get("version") != VERSION:
        raise ValueError(
            f"telemetry: {path} has version {shown(header.get('version'))} of the format; this jaxlowprec reads "
            f"{VERSION}; use a later one"
        )
    about = header.get("about")
    if not isinstance(about, dict) or not all(isinstance(value, str | int | float) for value in about.values()):
        raise _no_record(path)
    return about


def _no_record(path: pathlib.Path) -> ValueError:
    return ValueError(f"telemetry: {path} is no run's record; needs a file that telemetry.Recorder has written")


def _record(line: bytes, where: str) -> Record:
    try:
        found = json.loads(line)
        layers = {
            layer: {tensor: _unpacked(tensor, vector) for tensor, vector in tensors.items()}
            for layer, tensors in found["layers"].items()
        }
        scalars = {name: float(value) for name, value in found["scalars"].items()}
        shares = {layer: float(share) for layer, share in found.get("changed", {}).items()}
        return Record(int(found["step"]), float(found["time"]), scalars, layers, shares)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"telemetry: {where} is no record: {shown(str(error))}; restore the file, or delete that line"
        ) from None


def _as(kind: type, name: str, value: Any) -> Any:
    """A number of a record, as Python's. Raises TypeError or ValueError that names it."""
    try:
        return kind(value)
    except (TypeError, ValueError, OverflowError) as error:
        needs = "a whole number" if kind is int else "a number of float64"
        raised = TypeError if isinstance(error, TypeError) else ValueError
        raise raised(f"telemetry.Recorder.record: {name}={shown(value)}; needs {needs}") from None


def _number(value: float) -> float | str:
    """A number as JSON has it."""
    return value if math.isfinite(value) else str(value)


def _packed(tensor: str, statistics: Statistics) -> list[float | str]:
    """A vector in five digits, without the zeros at its end; of a GEMM what is known."""
    if tensor in GEMMS:
        values = np.array([getattr(statistics, name) for name in ERROR], np.float64)
    else:
        values = np.asarray(statistics.values, np.float64)
    kept = values[: np.flatnonzero(values)[-1] + 1].tolist()
    return [int(v) if v.is_integer() and abs(v) < 1e6 else _number(float(f"{v:.5g}")) for v in kept]


def _unpacked(tensor: str, vector: list[float | str]) -> Statistics:
    values = np.zeros(len(ERROR) if tensor in GEMMS else LENGTH)
    values[: len(vector)] = [float(v) for v in vector]
    return of_gemm(values) if tensor in GEMMS else Statistics(values)
