"""Headers and configs that were made to take long, or to break what reads them."""

import json
import time

import pytest

from jaxlowprec.checkpoints import schemes
from jaxlowprec.checkpoints.conversion.convert import ConvertOptions, convert
from jaxlowprec.checkpoints.conversion.inspect import inspect
from jaxlowprec.checkpoints.errors import CheckpointError, brief
from jaxlowprec.checkpoints.files.safetensors_file import SafetensorsFile
from jaxlowprec.checkpoints.files.safetensors_header import parse_header
from jaxlowprec.checkpoints.files.strict_json import MAX_DEPTH, load_json
from jaxlowprec.cli.inspect import render

MXFP4 = schemes.by_name("mxfp4")


ENDLESS = 10  # seconds of a processor: twenty times what it takes, and less than what grew with the square took


def seconds(work):
    """What an action takes of the processor."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def entry(dtype="U8", shape=(), begin=0, end=1):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def parsed(header, size=1):
    text = json.dumps(header).encode()
    return parse_header("x", text, 8 + len(text) + size)


def checkpoint(path, names, shapes):
    """A folder whose one file holds zeros of these names and shapes, bfloat16 or int16."""
    header, end = {}, 0
    for name, (rows, *rest) in zip(names, shapes, strict=True):
        begin, end = end, end + 2 * rows * (rest[0] if rest else 1)
        header[name] = entry("I16" if "count" in name else "BF16", (rows, *rest), begin, end)
    text = json.dumps(header).encode()
    path.mkdir()
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
    (path / "config.json").write_text("{}")
    return path


def test_a_name_that_comes_again_is_found_at_once():
    names = [f"{i:06}" for i in range(60_000)]
    text = "{" + ",".join(f'"{name}":0' for name in (*names, names[-1])) + "}"

    def load():
        with pytest.raises(CheckpointError, match="'059999' is given twice"):
            load_json("x", text.encode())

    assert seconds(load) < ENDLESS


@pytest.mark.parametrize(
    "name",
    [
        "t{}.embed.weight",  # left alone by a rule
        "count{}.weight",  # left alone, and named in the config's ignore
        "t{}.table",
        "l{}.experts.w",
        "l.experts.{}.w1.weight",
        "{}.q_proj.weight",
    ],
)
def test_planning_takes_time_in_proportion_to_the_tensors(tmp_path, name):
    count = 6000
    shape = (1, 1, 1) if name == "l{}.experts.w" else (1, 32)
    names = [name.format(i) for i in range(count)] + ["z.weight"]
    source = checkpoint(tmp_path / "x", names, [shape] * count + [(1, 32)])
    plan = lambda: convert(source, tmp_path / "y", MXFP4, options=ConvertOptions(dry_run=True))  # noqa: E731
    assert seconds(plan) < ENDLESS


def test_experts_that_lie_in_experts_are_ignored_once(tmp_path):
    names = ["a.experts.w", "a.experts.b.experts.w", "a.experts-b.experts.w", "b.weight"]
    report = convert(
        checkpoint(tmp_path / "x", names, [(1, 1, 1)] * 3 + [(1, 32)]),
        tmp_path / "y",
        MXFP4,
        options=ConvertOptions(dry_run=True),
    )
    assert report.ignore[:2] == [r"re:a\.experts(\.|$)", r"re:a\.experts\-b\.experts(\.|$)"]


def test_one_long_name_does_not_widen_every_line(tmp_path):
    names = ["x" * 60_000, *(f"t{i}" for i in range(1000))]
    found = inspect(checkpoint(tmp_path / "x", names, [(1,)] * 1001))
    text = "".join(render(found))
    assert "characters left out" in text and len(text) < 200_000


def nested(depth):
    return b"[" * depth + b"]" * depth


def test_nesting_has_a_limit():
    load_json("x", nested(MAX_DEPTH))
    for depth in (MAX_DEPTH + 1, 900, 100_000):
        with pytest.raises(CheckpointError, match="nested more than 100 deep|RecursionError"):
            load_json("x", nested(depth))


def test_a_deep_config_is_an_error_of_one_sentence(tmp_path):
    source = checkpoint(tmp_path / "x", ["a.weight"], [(1, 32)])
    for depth in (MAX_DEPTH, 400, 990, 5000):
        (source / "config.json").write_bytes(b'{"a":' * depth + b"0" + b"}" * depth)
        if depth == MAX_DEPTH:
            convert(source, tmp_path / "y", MXFP4)
            continue
        with pytest.raises(CheckpointError, match="config.json"):
            convert(source, tmp_path / f"y{depth}", MXFP4)


def test_a_number_beyond_float64_does_not_become_infinite():
    assert load_json("x", b"[1e308, 1e-999]", finite=True) == [1e308, 0.0]
    with pytest.raises(CheckpointError, match=r"the number '-1e309' is larger than float64 holds"):
        load_json("x", b'{"rope_theta": -1e309}', finite=True)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([2**62] * 17, r"takes more than 2\*\*60"),
        ([2**62] * 64, r"takes more than 2\*\*60"),
        ([1] * 65, "has 65 dimensions; at most 64 are read"),
        ([2**62] * 200_000, "has 200000 dimensions"),
        ([1] * 400_000, "has 400000 dimensions"),
        ([-1] * 400_000, "needs a list of whole numbers"),
        ([0, 2**62, 2**62], "which no array can have"),
        ([1000] * 20, r"shape \[1000, 1000, .* characters left out"),
    ],
)
def test_a_shape_is_measured_before_it_is_multiplied(shape, message):
    def parse():
        with pytest.raises(CheckpointError, match=message) as caught:
            parsed({"a": entry(shape=shape, end=0 if 0 in shape else 1)}, size=0)
        assert len(str(caught.value)) < 400

    assert seconds(parse) < ENDLESS


def test_the_largest_rank_is_read(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"")
    text = json.dumps({"a": entry(shape=[1] * 64)}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"\7")
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        assert file.read("a").shape == (1,) * 64


@pytest.mark.parametrize(
    "header",
    [
        {"x" * 3_000_000: entry(end=2)},
        {"a": entry(dtype="F" * 3_000_000)},
        {"a": {"y" * 3_000_000: 1}},
        {"a": {**entry(), "data_offsets": [1] * 1_000_000}},
    ],
)
def test_messages_are_cut_short(header):
    with pytest.raises(CheckpointError) as caught:
        parsed(header)
    assert 30 < len(str(caught.value)) < 400


def test_what_is_cut_keeps_both_ends():
    assert brief("short") == "'short'"
    assert brief("a" + "x" * 500 + "b").startswith("'axx") and brief("a" + "x" * 500 + "b").endswith("xxb'")


LONGEST = (1 << 16) - 1


@pytest.mark.parametrize("name", ["a" * 1_000_000, "a" * (LONGEST + 1), "\N{EURO SIGN}" * (LONGEST // 3 + 1)])
def test_a_name_that_is_too_long_is_refused_in_a_line(name):
    with pytest.raises(CheckpointError, match="has a name of .* characters; at most 65535 bytes are read") as refused:
        parsed({name: entry()})
    assert len(str(refused.value)) < 300
    assert list(parsed({name[: LONGEST // 3]: entry()}).tensors)


def test_long_names_widen_no_table_and_no_error(tmp_path):
    names = [f"l.{letter * 60_000}.{end}" for letter in "ab" for end in ("q_proj.weight", "x.weight", "count")]
    source = checkpoint(tmp_path / "x", names, [(2, 32)] * len(names))
    assert max(map(len, render(inspect(source)))) < 400
    report = convert(source, tmp_path / "y", MXFP4)
    assert report.changed and max(map(len, render(inspect(tmp_path / "y")))) < 400
    with pytest.raises(CheckpointError) as refused:
        convert(source, tmp_path / "z", MXFP4, include=[names[0] + "x"], ignore=["re:l.*"])
    assert len(str(refused.value)) < 1500
