"""The process in which a target's cases run: `python -m tests.hostile.worker TARGET MEMORY`. See `limits.py`."""

import json
import logging
import os
import pathlib
import resource
import sys
import tempfile
import time

from tests.hostile.limits import LENGTH
from tests.hostile.planted import PLANTED
from tests.hostile.targets import TARGETS

LONGEST_SENTENCE = 4000  # characters


def outcome_of(target, data, folder):
    """As `limits.Outcome`, a dictionary."""
    began = time.process_time()
    try:
        target.run(data, folder)
        kind, detail = "accepted", ""
    except target.refusals as error:
        kind, detail = "refused", str(error)
        fault = fault_of(detail)
        if fault:
            kind, detail = "broke", f"refused by a {type(error).__name__} {fault}: {detail[:300]!r}"
    except BaseException as error:
        kind, detail = "broke", f"raised {type(error).__name__}: {str(error)[:300]!r} at {place_of(error)}"
    return {"kind": kind, "detail": detail, "seconds": time.process_time() - began}


def fault_of(sentence):
    """What keeps a refusal's text from being a sentence that a terminal may show; "" if nothing does."""
    if len(sentence) < 10 or " " not in sentence:
        return "without a sentence"
    if len(sentence) > LONGEST_SENTENCE:
        return f"of {len(sentence)} characters"
    if not all(line.isprintable() for line in sentence.split("\n")):
        return "with characters that no terminal should get"
    return ""


def place_of(error):
    """The innermost line of the library that an error came from."""
    place, trace = "?", error.__traceback__
    while trace:
        file = pathlib.Path(trace.tb_frame.f_code.co_filename)
        if "jaxlowprec" in file.parts:
            place = f"{file.parent.name}/{file.name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def limit_memory(beyond):
    """Bounds the address space to what it is now and so much beyond."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    size = pages * os.sysconf("SC_PAGE_SIZE") + beyond
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main(name, memory):
    """Answers cases until standard input ends."""
    logging.getLogger("jaxlowprec").setLevel(logging.CRITICAL)  # refusals are logged, and cases are many
    target, cases = (TARGETS | PLANTED)[name], sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)  # what the library prints is no answer
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        for seed in target.seeds():
            outcome = outcome_of(target, seed, folder)
            if outcome["kind"] != "accepted":
                raise AssertionError(f"{name}: a case that nobody has changed: {outcome}")
        limit_memory(memory)
        answers.write(b'"ready"\n')
        while head := cases.read(LENGTH.size):
            data = cases.read(*LENGTH.unpack(head))
            answers.write(json.dumps(outcome_of(target, data, folder)).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
