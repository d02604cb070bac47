"""An operation, who computes it, and how well all agree."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Callable
from typing import Any

import numpy as np
from cells import share
from timing import alternate, environment

PAUSE = 0.02  # for the threads of the library before to come to rest
THREADS = environment()["cores"]


@dataclasses.dataclass(frozen=True)
class Side:
    """One way to compute an operation.

    Arguments:
        call: what is measured.
        numbers: what the call returned, as float32 numbers that approximate the operation's truth.
        limit: the largest relative error that the format explains.
        codes: the bytes of what the call returned, by name, where others may have the same.
    """

    call: Callable[[], Any]
    numbers: Callable[[Any], np.ndarray]
    limit: float
    codes: Callable[[Any], dict[str, np.ndarray]] = lambda result: {}


@dataclasses.dataclass(frozen=True)
class Peer:
    """Another library's way.

    Arguments:
        packages: what has to be installed.
        against: the names of our sides that it is compared with.
    """

    name: str
    packages: tuple[str, ...]
    make: Callable[[], Side]
    against: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Operation:
    """What all sides compute.

    Arguments:
        truth: the numbers without any rounding to a format.
        repeats: how often a call does it.
        slow: measured in fewer rounds.
    """

    name: str
    truth: np.ndarray
    ours: dict[str, Callable[[], Side]]
    peers: tuple[Peer, ...]
    repeats: int = 1
    slow: bool = False


def beside(operations: list[Operation], names: list[str]) -> list[Operation]:
    """The operations that these peers have, without other peers and without the sides of ours that only those need."""
    found = []
    for operation in operations:
        peers = tuple(peer for peer in operation.peers if peer.name in names)
        needed = {name for peer in peers for name in peer.against}
        ours = {name: make for name, make in operation.ours.items() if name in needed}
        found += [dataclasses.replace(operation, ours=ours, peers=peers)] if peers else []
    return found


def versions(operations: list[Operation]) -> dict[str, str]:
    """Of every package that takes part and is installed."""
    names = {package for operation in operations for peer in operation.peers for package in peer.packages}
    return {name: importlib.metadata.version(name) for name in sorted(names) if _installed(name)}


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@dataclasses.dataclass(frozen=True)
class _Answer:
    """What a side computed, or why it did not."""

    side: Side | None = None
    error: float = 0.0
    codes: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    failure: str = ""


def relative_error(numbers: np.ndarray, truth: np.ndarray) -> float:
    """In the Frobenius norm."""
    difference = np.asarray(numbers, np.float32).reshape(truth.shape) - truth
    return float(np.linalg.norm(difference.ravel()) / np.linalg.norm(truth.ravel()))


def _answer(make: Callable[[], Side], truth: np.ndarray) -> _Answer:
    side = make()
    result = side.call()
    error = relative_error(side.numbers(result), truth)
    if not error <= side.limit:
        raise ArithmeticError(f"relative error {error:.3g}; its format explains {side.limit:g}")
    return _Answer(side, error, side.codes(result))


def _peers_answer(peer: Peer, truth: np.ndarray) -> _Answer:
    missing = [package for package in peer.packages if not _installed(package)]
    if missing:
        return _Answer(failure=f"not installed: {', '.join(missing)}")
    try:
        return _answer(peer.make, truth)
    except Exception as error:  # whatever goes wrong in another library is a result
        first = (str(error).strip() or "no message").splitlines()[0]
        return _Answer(failure=f"{type(error).__name__}: {first[:200]}")


def measured(operation: Operation, rounds: int) -> list[dict]:
    """A case for each peer and side of ours. All sides run in turn in one run.

    Raises:
        ArithmeticError: our own result is wrong.
    """
    ours = {name: _answer(make, operation.truth) for name, make in operation.ours.items()}
    theirs = {peer.name: _peers_answer(peer, operation.truth) for peer in operation.peers}
    answers = {("ours", name): answer for name, answer in ours.items()}
    answers |= {("theirs", name): answer for name, answer in theirs.items() if answer.side}
    seconds = alternate({key: answer.side.call for key, answer in answers.items()}, rounds, pause=PAUSE)
    for side in seconds.values():
        side.update({k: s / operation.repeats for k, s in side.items()})
    cases = []
    for peer in operation.peers:
        for name in peer.against:
            case = {"case": operation.name, "side": name, "against": peer.name, "target": None}
            found = theirs[peer.name]
            if found.side is None:
                cases.append(case | {"failure": found.failure})
                continue
            mine, other = seconds["ours", name], seconds["theirs", peer.name]
            case |= {"ratio": {k: other[k] / mine[k] for k in mine}, "ours": mine, "theirs": other}
            case |= {"error": {"ours": ours[name].error, "theirs": found.error}}
            case["same"] = {
                k: float(np.mean(mine == found.codes[k])) for k, mine in ours[name].codes.items() if k in found.codes
            }
            cases.append(case)
    return cases


def told(case: dict) -> str:
    """A case in a line."""
    about = f"{case['side']:16} {case['against']:44}"
    if "failure" in case:
        return f"{about} {case['failure']}"
    mine, other = (f"{1e3 * case[side]['median']:8.3f} ms" for side in ("ours", "theirs"))
    errors = "error {ours:.2g}, {theirs:.2g}".format(**case["error"])
    same = "".join(f", {share(part)} of the {name} the same" for name, part in case["same"].items())
    return f"{about} {case['ratio']['median']:7.2f}x  {mine}, {other}  {errors}{same}"
