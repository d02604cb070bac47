"""Numbers of versions: every kind of whole number counts, and what is none is called that."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlowprec.weight_sync import DirectoryTransport, InProcess, Receiver, Refused, Session, WeightSource, pull, push
from jaxlowprec.weight_sync.bucket import MAX_VERSION
from jaxlowprec.weight_sync.engines.sglang import SGLang
from tests.weight_sync.engines.engine_stubs import SGLangStub, serving
from tests.weight_sync.syncing import is_whole, model, over_tcp, packed


@pytest.mark.parametrize("number", [np.int64, np.uint8, np.asarray, jnp.int32])
def test_numbers_of_numpy_and_jax_are_versions(tmp_path, number):
    receiver = Receiver()
    assert push(WeightSource(model(3)), InProcess(receiver), version=number(3)) == 3
    assert type(receiver.version) is int and is_whole(receiver.weights, 3)
    assert push(WeightSource(model(4)), DirectoryTransport(tmp_path), version=number(4)) == 4
    assert pull(tmp_path, receiver) == 4
    with over_tcp() as (served, _, transport, _):
        assert push(WeightSource(model(5)), transport, version=number(5)) == 5
        assert served.version == 5


@pytest.mark.parametrize("number", [np.int64, int])
def test_a_transport_takes_them_too(number, tmp_path):
    manifest, buckets = packed(model(3), 3)
    with over_tcp() as (_, _, over, _):
        for transport in (InProcess(Receiver()), DirectoryTransport(tmp_path), over):
            transport.pause(60)
            transport.begin(number(3), manifest, 60)
            for bucket in buckets:
                transport.send(bucket, 60)
            transport.commit(number(3), manifest.hash, 60)
            transport.resume(60)
            assert transport.version(60) == 3


@pytest.mark.parametrize("version", [3.0, "3", True, np.float32(3)])
def test_what_is_no_whole_number_is_said_to_be_none(tmp_path, version):
    with pytest.raises(ValueError, match="Session: version is .*; needs a whole number"):
        Session(InProcess(Receiver()), version=version)
    for transport in (InProcess(Receiver()), DirectoryTransport(tmp_path)):
        transport.pause(60)
        with pytest.raises(Refused, match="needs a whole number above 0"):
            transport.begin(version, packed(model(1), 1)[0], 5)
        transport.resume(60)


@pytest.mark.parametrize("version", [MAX_VERSION + 1, 10**5000], ids=["2^63", "5000 digits"])
def test_a_version_beyond_all_others_is_said_to_be_too_large(tmp_path, version):
    with over_tcp() as (_, _, over, _):
        for transport in (InProcess(Receiver()), DirectoryTransport(tmp_path), over):
            transport.pause(60)
            with pytest.raises(Refused, match=r"a version of \d+ bits; needs at most 9223372036854775807"):
                transport.begin(version, packed(model(1), 1)[0], 5)
            transport.resume(60)


@pytest.mark.parametrize("said", ["9" * 5000, "9223372036854775808", "0" * 5000 + "1" * 20])
def test_an_engine_with_an_unknown_version_is_reported(tmp_path, said):
    stub = SGLangStub()
    stub.weight_version = said
    with serving(stub) as url, pytest.raises(Refused, match=r"versions are at most 9223372036854775807; restart it"):
        SGLang(url, tmp_path).version(60)


@pytest.mark.parametrize(("said", "version"), [("0" * 5000 + "7", 7), ("default", 0), ("٣", 0), ("", 0)])
def test_an_engines_own_words_count_as_none(tmp_path, said, version):
    stub = SGLangStub()
    stub.weight_version = said
    with serving(stub) as url:
        assert SGLang(url, tmp_path).version(60) == version
