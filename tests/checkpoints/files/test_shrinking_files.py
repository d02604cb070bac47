"""A source that becomes shorter while it is read is an error that names it, and never the end of the process."""

import json

import pytest

from tests.checkpoints.small_models import llama, write_checkpoint
from tests.helpers import run_python

# In a process of its own: a mapped file that is cut short would end it by a signal.
SHRINKING = """
import json, os, pathlib, sys

from jaxlowprec.checkpoints import schemes
from jaxlowprec.checkpoints.conversion import convert, inspect, jobs, quantizing
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.safetensors_file import SafetensorsFile, SafetensorsWriter

source, path = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
weights = source / "model.safetensors"
whole = weights.read_bytes()


def read():
    with SafetensorsFile(weights) as file:
        return file.read("model.layers.0.mlp.up_proj.weight")


def copy():
    with SafetensorsFile(weights) as file, SafetensorsWriter(path / "copy.safetensors", file.specs) as writer:
        for name in file.specs:
            writer.copy(name, file, name)


def converted(scheme, verify=False):
    name, options = f"{scheme}-{verify}", convert.ConvertOptions(verify=verify)
    return lambda: convert.convert(source, path / name, schemes.by_name(scheme), options=options)


def said(owner, function, work):
    "What an action says when the file is cut short as it comes to a function."
    before = getattr(owner, function)

    def shrinking(*arguments, **options):
        os.truncate(weights, 8192)  # the header is still there
        return before(*arguments, **options)

    weights.write_bytes(whole)
    setattr(owner, function, shrinking)
    try:
        work()
    except CheckpointError as error:
        return str(error)
    finally:
        setattr(owner, function, before)


print(json.dumps({
    "read": said(SafetensorsFile, "raw", read),
    "copy": said(SafetensorsFile, "copy_to", copy),
    "convert": said(jobs, "_require_space", converted("mxfp4")),
    "amax": said(quantizing, "amax", converted("nvfp4")),
    "verify": said(convert, "compare_shards", converted("mxfp4", verify=True)),
    "inspect": said(inspect, "_compared", lambda: inspect.inspect(source, source)),
}))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What each way to read a checkpoint says when the file is cut short after it was opened."""
    path = tmp_path_factory.mktemp("shrinking")
    source = write_checkpoint(path / "source", llama(1), shards=1)
    return json.loads(run_python("-c", SHRINKING, str(source), str(path)).stdout)


@pytest.mark.slow
@pytest.mark.parametrize("action", ["read", "copy", "convert", "amax", "verify", "inspect"])
def test_a_file_cut_short_is_an_error_with_its_name(said, action):
    assert "model.safetensors: became shorter while it was read" in said[action]
