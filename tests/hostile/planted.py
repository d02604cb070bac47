"""Targets that break in every way there is: what the campaign has to find."""

import ctypes
import time

from tests.hostile.target import Target


class Refused(Exception):
    """A refusal."""


def spend(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def say(text):
    raise Refused(text)


FAULTS = {
    b"error": lambda: {}["missing"],
    b"signal": lambda: ctypes.string_at(0),
    b"end": lambda: __import__("os")._exit(3),
    b"slow": lambda: spend(5.3),
    b"memory": lambda: bytearray(1 << 40),
    b"long": lambda: say("a word " * 1000),
    b"escape": lambda: say("a tensor named \x1b[31mred"),
    b"riddle": lambda: say("3"),
    b"refused": lambda: say("this is refused: say something else"),
    b"accepted": lambda: None,
}

PLANTED = {"planted": Target(lambda data, folder: FAULTS[data](), lambda: [b"accepted"], (Refused,))}
