"""Damaged and hostile safetensors files give errors, never another weight: every field of a header, mutated.

The official library is the judge: what it refuses must be refused here, and what is read must be what it reads.
"""

import copy
import json
import random

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.safetensors_file import SafetensorsFile

HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "U8", "shape": [], "data_offsets": [32, 33]},
}
DATA = bytes(range(33))

ODD_VALUES = [
    *(None, True, False, -1, 0, 1, 3, 2**31, 2**63, 2**64, 10**400, 1.0, 0.5),
    *("", "x", "F32", "BF16", "F16", "I32", "F4", "f32", "F128"),
    *([], [0], [6], [2, 3], [3, 2], [-2, -3], [2, 3, 1], [2.0, 3], ["2", "3"], [True, 6], [2**32, 2**32], [2**64, 0]),
    *([0, 24], [24, 0], [1, 25], [24, 32], [32, 33], [0, 33], [25, 33], [0, 0], [0, 2**64], [None, None]),
    *({}, {"dtype": "F32"}, {"x": "y"}, {"x": 1}),
]


def file_bytes(header, data=DATA):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def official(path):
    """What the official library reads: bytes by name; None where it refuses."""
    try:
        read = safetensors.deserialize(path.read_bytes())
        return {name: (info["shape"], info["dtype"], bytes(info["data"])) for name, info in read}
    except Exception:  # noqa: BLE001 (whatever it raises is a refusal)
        return None


def ours(path):
    try:
        with SafetensorsFile(path) as file:
            return {
                n: (list(e.spec.shape), e.spec.dtype, file.raw(n).tobytes()) for n, e in file.header.tensors.items()
            }
    except CheckpointError as error:
        assert str(path) in str(error) and len(str(error)) < 1000 + len(str(path))
        return None


def judged(path, content):
    """Whether it was read. It must then be what the official library reads too."""
    path.write_bytes(content)
    found = ours(path)
    if found is not None:
        assert found == official(path)
    return found is not None


def mutations():
    """Every field of the header, removed and replaced by every odd value."""
    fields = [(name, key) for name in "abc" for key in ("dtype", "shape", "data_offsets")]
    for name in ("__metadata__", *"abc"):
        for value in ODD_VALUES:
            yield name, None, value
        yield name, None, KeyError
    for name, key in fields:
        for value in [*ODD_VALUES, KeyError]:
            yield name, key, value


def mutated(name, key, value):
    header = copy.deepcopy(HEADER)
    holder, last = (header, name) if key is None else (header[name], key)
    if value is KeyError:
        del holder[last]
    else:
        holder[last] = value
    return header


def test_the_unharmed_file_is_read(tmp_path):
    assert judged(tmp_path / "x.safetensors", file_bytes(HEADER))


def test_every_field_mutated(tmp_path):
    read = [m for m in mutations() if judged(tmp_path / "x.safetensors", file_bytes(mutated(*m)))]
    # what says the same of the same bytes, or other things that are consistent, and nothing else
    for name, key, value in read:
        header = mutated(name, key, value)
        assert {k: v["data_offsets"] for k, v in header.items() if k != "__metadata__"} == {
            k: v["data_offsets"] for k, v in HEADER.items() if k != "__metadata__"
        }, (name, key, value)
    assert ("a", "shape", [3, 2]) in read and ("a", "dtype", "I32") in read and ("b", "dtype", "F16") in read
    assert len(read) < 30, read


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (mutated("b", "data_offsets", [20, 28]), "overlaps"),
        (mutated("c", "data_offsets", [33, 34]), "gap of 1 bytes"),
        (mutated("a", "shape", [2, 4]), "has 24 bytes; F32 of shape"),
        (mutated("a", "shape", [2**62, 2**62]), "has 24 bytes"),
        (mutated("c", None, KeyError), "too long"),
        (mutated("a", "dtype", "F31"), "dtype 'F31', which safetensors does not define"),
        ({**HEADER, "d": {"dtype": "U8", "shape": [1 << 40], "data_offsets": [33, 33 + (1 << 40)]}}, "truncated"),
        ({**HEADER, "d": {"dtype": "F4", "shape": [3], "data_offsets": [33, 34]}}, "takes 1.5"),
        ([], "not a JSON object"),
        (b" {}", "not a JSON object"),
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe{}", "not JSON in UTF-8"),
        (b'{"a":NaN}', "NaN is not valid JSON"),
        (b'{"a":' * 100_000, "not JSON"),
        (b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,1]}}', "not JSON"),
        (b'{"\\ud800":{"dtype":"U8","shape":[33],"data_offsets":[0,33]}}', "not JSON in UTF-8"),
        (b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}', "'a' is given twice"),
        (b'{"a":{"dtype":"U8","dtype":"I8","shape":[33],"data_offsets":[0,33]}}', "'dtype' is given twice"),
        (mutated("__metadata__", None, {"x": 1}), "map strings to strings"),
        ({**HEADER, "a": {**HEADER["a"], "extra": 1}}, "exactly dtype, shape and data_offsets"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(tmp_path, header, message):
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_bytes(header))
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFile(path)


def test_every_truncation_is_an_error(tmp_path):
    whole = file_bytes(HEADER)
    for length in range(len(whole)):
        assert not judged(tmp_path / "x.safetensors", whole[:length]), length
    assert not judged(tmp_path / "x.safetensors", whole + b"\0")


@pytest.mark.parametrize("length", [0, 1, 100_000_001, 2**31, 2**63, 2**64 - 1])
def test_a_false_header_length_is_an_error_at_once(tmp_path, length):
    assert not judged(tmp_path / "x.safetensors", length.to_bytes(8, "little") + file_bytes(HEADER)[8:])


def test_flipped_header_bits_give_nothing_safetensors_refuses(tmp_path):
    whole = file_bytes(HEADER)
    end = len(whole) - len(DATA)
    read = sum(
        judged(tmp_path / "x.safetensors", whole[:i] + bytes([whole[i] ^ 1 << bit]) + whole[i + 1 :])
        for i in range(end)
        for bit in range(8)
    )
    assert 0 < read < end * 8 / 4  # other letters in names, other consistent shapes; most are errors


def test_random_damage(tmp_path):
    source = random.Random(5)
    whole = file_bytes(HEADER)
    for _ in range(1500):
        damaged = bytearray(whole)
        for _ in range(source.randint(1, 6)):
            match source.randrange(4):
                case 0:
                    damaged[source.randrange(len(damaged))] = source.randrange(256)
                case 1:
                    del damaged[source.randrange(len(damaged))]
                case 2:
                    damaged.insert(source.randrange(len(damaged)), source.choice(b'0123456789[]{},:"'))
                case 3:
                    at = source.randrange(len(damaged))
                    damaged[at:at] = damaged[at : at + source.randint(1, 30)]
        judged(tmp_path / "x.safetensors", bytes(damaged))


def test_what_is_no_file_is_named(tmp_path):
    for path in (tmp_path / "missing.safetensors", tmp_path):
        with pytest.raises(CheckpointError, match=str(path)):
            SafetensorsFile(path)


def test_a_header_at_the_limit_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(200_000_000)  # sparse
    with pytest.raises(CheckpointError, match="header of 100000001 bytes; safetensors allows 100000000"):
        SafetensorsFile(path)


def test_names_are_kept_as_they_are(tmp_path):
    name = "ключ/../\u0000\n.weight"
    header = {name: {"dtype": "U8", "shape": [33], "data_offsets": [0, 33]}}
    assert judged(tmp_path / "x.safetensors", file_bytes(header))
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        assert np.array_equal(file.read(name), np.frombuffer(DATA, np.uint8))
