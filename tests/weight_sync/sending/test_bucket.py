"""Buckets and manifests: what is written is read, what is wrong is refused, bundles stay together."""

import json

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from jaxlowprec.weight_sync import Bucketizer, Entry, Manifest, WeightSource
from jaxlowprec.weight_sync.bucket import ALIGNMENT, BucketHeader, checksum, pack, views

ARRAYS = {
    "a": np.arange(5, dtype=np.uint8),
    "b": np.ones((2, 3), ml_dtypes.bfloat16),
    "c": np.zeros((0, 4), np.float32),
    "d": np.asarray(7, np.int64),
    "e": np.arange(6, dtype=np.float32).reshape(2, 3).T,
}


def test_a_bucket_gives_back_its_arrays():
    bucket = pack(3, 1, False, ARRAYS)
    found = views(bucket.header, bucket.payload)
    assert list(found) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()
    assert all(placed.offset % ALIGNMENT == 0 for placed in bucket.entries)
    assert bucket.checksum == checksum(bucket.payload) and pack(3, 1, False, ARRAYS).checksum == bucket.checksum


def test_headers_and_manifests_survive_json():
    header = pack(3, 1, False, ARRAYS).header
    manifest = Manifest(tuple(placed.entry for placed in header.entries), {"name": "w4a16", "group_size": 32})
    assert BucketHeader.from_json(header.to_json()) == header
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert Manifest.from_json(manifest.to_json()).hash == manifest.hash


def changed(**fields):
    content = json.loads(pack(3, 1, False, ARRAYS).header.to_json())
    content |= fields
    return json.dumps({name: value for name, value in content.items() if value is not None}).encode()


ENTRY = ["a", "U8", [5], 0]
wrong_headers = {
    "not JSON": (b"{", "not JSON"),
    "a list": (b"[]", "needs a JSON object"),
    "a field twice": (b'{"version": 1, "version": 1}', "given twice"),
    "NaN": (b'{"version": NaN}', "not valid JSON"),
    "a field too few": (changed(last=None), "needs a JSON object with"),
    "a field too many": (changed(more=1), "needs a JSON object with"),
    "version 0": (changed(version=0), "version is 0"),
    "version true": (changed(version=True), "version is True"),
    "a huge version": (changed(version=2**63), "version is 9223372036854775808"),
    "index -1": (changed(index=-1), "index is -1"),
    "last 1": (changed(last=1), "last is 1"),
    "checksum of 31 digits": (changed(checksum="0" * 31), "checksum is"),
    "no checksum": (changed(checksum=""), "no checksum"),
    "checksum 0": (changed(checksum=0), "no checksum"),
    "entries an object": (changed(entries={}), "entries must be a list"),
    "an entry of three": (changed(entries=[["a", "U8", [5]]]), "entries must be a list"),
    "an unknown dtype": (changed(entries=[["a", "F5", [5], 0]]), "dtype 'F5'"),
    "a dtype of 4 bits": (changed(entries=[["a", "F4", [6], 0]]), "dtype 'F4'"),
    "a name that is none": (changed(entries=[[7, "U8", [5], 0]]), "name is 7"),
    "a negative size": (changed(entries=[["a", "U8", [-5], 0]]), "shape"),
    "a size of 1.5": (changed(entries=[["a", "U8", [1.5], 0]]), "shape"),
    "a shape that is none": (changed(entries=[["a", "U8", "5", 0]]), "shape"),
    "sizes beyond all memory": (changed(entries=[["a", "U8", [2**40, 2**40], 0]]), "more than"),
    "sizes beyond all memory and 0": (changed(entries=[["a", "U8", [2**60, 0], 0]]), "more than"),
    "not aligned": (changed(entries=[["a", "U8", [5], 8]]), "'a' lies at 8; needs a multiple of 16"),
    "a negative offset": (changed(entries=[["a", "U8", [5], -16]]), "'a' lies at -16"),
    "an offset of 0.0": (changed(entries=[["a", "U8", [5], 0.0]]), "'a' lies at 0.0"),
    "overlap": (changed(entries=[["a", "U8", [17], 0], ["b", "U8", [1], 16]]), "within the one before it"),
    "a gap": (changed(entries=[["a", "U8", [5], 0], ["b", "U8", [1], 32]]), "after a gap that begins at 5"),
    "a name twice": (changed(entries=[ENTRY, ["a", "U8", [5], 16]], nbytes=21), "a tensor is there twice"),
    "bytes after the last": (changed(entries=[ENTRY], nbytes=6), "the payload has 6 bytes; its tensors end at 5"),
    "bytes too few": (changed(entries=[ENTRY], nbytes=4), "the payload has 4 bytes"),
}


@pytest.mark.parametrize(("text", "message"), wrong_headers.values(), ids=wrong_headers)
def test_a_wrong_header_is_an_error(text, message):
    with pytest.raises(ValueError, match=message):
        BucketHeader.from_json(text)


wrong_manifests = {
    "another format": (b'{"entries": [], "format": 2, "scheme": null}', "format 2"),
    "entries of two": (b'{"entries": [["a", "U8"]], "format": 1, "scheme": null}', "must be a list of"),
    "a name twice": (b'{"entries": [["a", "U8", []], ["a", "I8", []]], "format": 1, "scheme": null}', "there twice"),
    "a scheme without a name": (b'{"entries": [], "format": 1, "scheme": {}}', "needs a 'name'"),
    "a scheme that is a list": (b'{"entries": [], "format": 1, "scheme": []}', "needs an object or null"),
    "deep nesting": (b"[" * 100_000, "not JSON"),
}


@pytest.mark.parametrize(("text", "message"), wrong_manifests.values(), ids=wrong_manifests)
def test_a_wrong_manifest_is_an_error(text, message):
    with pytest.raises(ValueError, match=message):
        Manifest.from_json(text)


def test_bytes_that_do_not_belong_to_a_shape_are_an_error():
    with pytest.raises(ValueError, match="nbytes=7; F32 .2,. takes 8"):
        Entry("a", "F32", (2,), 7)


@given(st.binary(max_size=200))
def test_any_other_text_is_a_value_error(text):
    for read in (BucketHeader.from_json, Manifest.from_json):
        with pytest.raises(ValueError):  # noqa: PT011
            read(text)


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "norm", "fused_qkv_a_proj")


@given(
    st.lists(st.lists(st.tuples(st.sampled_from(PROJECTIONS), st.integers(0, 50)), max_size=6), max_size=5),
    st.integers(1, 400),
)
def test_bundles_stay_whole_and_buckets_within_their_size(layers, max_bytes):
    tree = {f"l{i}": {name: {"w": np.full(n, i, np.uint8)} for name, n in layer} for i, layer in enumerate(layers)}
    source = WeightSource(tree)
    together = [{f"l{i}.{p}_proj.w" for p in fused} for i in range(len(layers)) for fused in ("qkv", ("gate", "up"))]
    with Bucketizer(max_bytes).buckets(source, 1, timeout=10) as made:
        seen, names = [], []
        for index, bucket in enumerate(made):
            held = [placed.entry.name for placed in bucket.entries]
            seen.append(set(held))
            names += held
            bundles = [bundle for bundle in source.bundles if {e.name for e in bundle.entries} & seen[-1]]
            assert bucket.index == index and bucket.checksum == checksum(bucket.payload)
            assert bucket.header.nbytes <= max_bytes or len(bundles) == 1
    assert names == [entry.name for entry in source.manifest.entries]
    for bundle in together:
        assert sum(1 for held in seen if held & bundle) <= 1
    assert bucket.last


@pytest.mark.parametrize("max_bytes", [0, -1, 1.5, True])
def test_a_bucket_needs_a_size(max_bytes):
    with pytest.raises(ValueError, match="needs a positive whole number"):
        Bucketizer(max_bytes)
