"""Hostile records of a run's telemetry, and logs of a search for a policy."""

from __future__ import annotations

import html.parser
import io
import json
import math

from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.cli import watch
from jaxlowprec.models.policy_log import Log
from jaxlowprec.telemetry.limits import Limits, findings
from jaxlowprec.telemetry.recording import Recorder, load
from jaxlowprec.telemetry.report.page import page
from tests.hostile.target import Target

HEADER = {"format": "jaxlowprec telemetry", "version": 1, "names": ["uses"], "gemms": ["error"], "about": {"width": 8}}
VECTOR = [1000, 10, 3, 2, *[0.5] * 40]
NAMES = (
    *("<!--script-->", "<!--<script>", "</script>", "<script>", "\x1b]0;PWNED\x1b\\loss", "\x1b[31mbad", "\u202eup"),
    *("7" * 5000, "\\ud800", "a" * 70000, "", "[bold]up[/bold]", "[/]", "__proto__", "constructor"),
)


SCRIPTS = [0, "data", 2]
"""A page's scripts, by identifier or place."""


def record(step, *layers):
    tensors = {"input rowwise": VECTOR, "weight rowwise": VECTOR, "fprop": [0.1, 0.2]}
    return {
        "step": step,
        "time": 1763900000.0 + step,
        "scalars": {"loss": 2.5, "norm": "inf"},
        "layers": dict.fromkeys(layers, tensors),
        "changed": {layers[0]: 0.02},
    }


class Data(html.parser.HTMLParser):
    """What a page's scripts hold; the JSON's is that with the identifier "data"."""

    def __init__(self, text):
        super().__init__()
        self.scripts, self._within = {}, None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag == "script":
            self._within = dict(attributes).get("id", len(self.scripts))
            self.scripts[self._within] = ""

    def handle_endtag(self, tag):
        if tag == "script":
            self._within = None

    def handle_data(self, data):
        if self._within is not None:
            self.scripts[self._within] += data


def show(data, folder):
    """A record in a terminal and as a page: its text has no escape, its JSON is JSON; and a recorder continues it."""
    path = folder / "telemetry.jsonl"
    path.write_bytes(data)
    run, limits = load(path), Limits()
    lines = watch.lines(run, limits, 12)
    streams = io.StringIO()
    shown(watch._shown(run, limits, 12), streams)
    for text in (streams.getvalue(), "".join(map(watch.printable, lines))):
        assert not any(ord(c) < 32 and c not in "\n" for c in text), text[:300]
    for finding in findings(run, limits):
        assert len(finding.text) < 2000, f"a finding of {len(finding.text)} characters"
    json.dumps(watch._content(run, limits))
    text = page([run], limits)
    found = Data(text)
    layers = {layer for record in run.records for layer in record.layers}
    assert "<" not in found.scripts["data"] and list(found.scripts) == SCRIPTS, list(found.scripts)
    told = json.loads(found.scripts["data"], parse_constant=lambda word: 1 / 0)["runs"][0]["layers"]
    assert set(told) <= layers, set(told) - layers
    with Recorder(path) as recorder:
        recorder.record(2**40, None, loss=1.0)
    assert load(path).records[-1].step >= 2**40


def shown(parts, stream):
    """The parts of a terminal's picture, without colours."""
    from rich.console import Console

    console = Console(file=stream, width=200, force_terminal=False)
    for part in parts:
        console.print(part)


def record_seeds():
    lines = (HEADER, record(1, "up"), record(2, "up", "down"), record(3, "blocks/0/up", "down"))
    return ["".join(json.dumps(line) + "\n" for line in lines[:count]).encode() for count in (1, 2, 4)]


def change_lines(mutator, data):
    """A line's JSON changed, a name that a terminal or a browser takes for something else, or any bytes."""
    draw, lines = mutator.random, data.split(b"\n")
    how, at = draw.random(), draw.randrange(len(lines))
    if how < 0.3:
        name = json.dumps(draw.choice(NAMES).replace("\\ud800", "\ud800")).encode()
        old = draw.choice((b'"up"', b'"down"', b'"loss"', b'"input rowwise"', b'"width"', b'"nvfp4"'))
        return data.replace(old, name, draw.choice((1, -1)))
    if how < 0.8:
        lines[at] = mutator.json(lines[at]) if lines[at] else mutator.bytes(data)
    elif how < 0.9:
        lines.insert(draw.randrange(len(lines) + 1), lines[at])
    else:
        return mutator.bytes(data)
    return b"\n".join(lines)


ABOUT = {"units": [["up", "fprop", "nvfp4"]], "candidates": {"nvfp4": "NVFP4"}, "key": [0, 1]}


def continue_log(data, folder):
    """A search that goes on with a log: what is there stays, but for an unfinished last line."""
    path = folder / "policy.jsonl"
    path.write_bytes(data)
    try:
        with Log(path, ABOUT) as log:
            reference = log.get("reference", 0)
            assert reference is None or all(type(value) is float for value in reference)
            found = log.get(["up", "fprop", "nvfp4"], 0, 0)
            assert found is None or len(found) == 3
    except ValueError:
        assert path.read_bytes() == data, "a refused file has changed"
        raise
    whole = data[: data.rfind(b"\n") + 1]
    assert path.read_bytes().startswith(whole)


def log_seeds():
    lines = (
        {"format": "jaxlowprec policy", **ABOUT},
        [json.dumps(["reference", 0]), 2.5, math.pi],
        [json.dumps([["up", "fprop", "nvfp4"], 0, 0]), 0.1, 0.9, 0.2],
    )
    return ["".join(json.dumps(line) + "\n" for line in lines[:count]).encode() for count in (0, 1, 3)]


REFUSALS = (ValueError, CheckpointError)
TARGETS = {
    "telemetry": Target(show, record_seeds, REFUSALS, change_lines),
    "policy_log": Target(continue_log, log_seeds, REFUSALS, change_lines),
}
