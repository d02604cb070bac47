"""Trees and files that a trainer gives by mistake: each is an error that names what, before anything is sent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlowprec.checkpoints import LLAMA
from jaxlowprec.weight_sync import DirectoryTransport, WeightSource, differences, to_tree
from jaxlowprec.weight_sync.engines.vllm import VLLM
from jaxlowprec.weight_sync.sending.source import natural
from tests.weight_sync.trees import llama, synced


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"lr": 0.1, "w": np.ones(2)}, "the tree has 0.1 at lr, a float; needs arrays, such as numpy.float32"),
        ({"a": [np.ones(1), 2]}, "the tree has 2 at a.1, a int"),
        ({"a": {"name": "up" * 1000}}, "the tree has 'upup.*left out.* at a.name, a str"),
        (True, "the tree has True at its root, a bool"),
        ({"rng": jax.random.key(0)}, "the tree has key<fry> at rng; needs its numbers: jax.random.key_data"),
    ],
)
def test_leaves_that_are_no_arrays_are_named(tree, message):
    with pytest.raises(TypeError, match=f"WeightSource: {message}"):
        WeightSource(tree)
    with pytest.raises(TypeError, match=f"to_tree: `like` has {message.removeprefix('the tree has ')}"):
        to_tree({}, tree)


def test_they_are_named_with_a_mapping_too():
    with pytest.raises(TypeError, match=r"the tree has 1.0 at norm.scale, a float"):
        WeightSource(llama(1) | {"norm": {"scale": 1.0}}, LLAMA)


def test_numpys_scalars_are_arrays():
    tree = {"step": np.int32(7), "scale": np.float32(0.5), "half": jnp.bfloat16(2)}
    receiver = synced(tree)
    assert differences(WeightSource(tree), receiver) == []
    assert receiver.weights["step"].shape == () and receiver.weights["step"] == 7


def test_a_dtype_that_cannot_be_sent_is_named_with_its_leaf():
    with pytest.raises(ValueError, match="layer.names: safetensors: no file holds elements of <U2"):
        WeightSource({"layer": {"names": np.asarray(["up"])}})


def test_two_leaves_of_one_name_are_refused_and_none_is_lost():
    with pytest.raises(ValueError, match=r"two leaves of the tree have the path 'a.b'"):
        WeightSource({"a.b": np.ones(1), "a": {"b": np.zeros(1)}})


def test_names_with_any_number_of_digits_have_an_order():
    long = "9" * 5000
    tree = {f"a{long}": np.ones(1), "a10": np.ones(1), "a9": np.ones(1), "a01": np.ones(1), "a1": np.ones(1)}
    names = [entry.name for entry in WeightSource(tree).manifest.entries]
    assert names == ["a01", "a1", "a9", "a10", f"a{long}"]
    assert names == [entry.name for entry in WeightSource(dict(reversed(tree.items()))).manifest.entries]
    assert natural("a") < natural("a1") < natural("a1b") < natural("b")


@pytest.mark.parametrize("made", [DirectoryTransport, lambda *a, **o: VLLM("http://localhost:1", *a, **o)])
def test_two_files_of_one_name_are_refused(tmp_path, made):
    files = [tmp_path / "a" / "config.json", tmp_path / "b" / "config.json"]
    for file in files:
        file.parent.mkdir()
        file.write_text("{}")
    with pytest.raises(ValueError, match=r"files has .*/a/config.json and .*/b/config.json; needs files with names"):
        made(tmp_path / "versions", files=files)
