"""compressed-tensors' converter of AutoAWQ's files makes of ours what we write for it."""

import numpy as np
import pytest

from jaxlowprec.checkpoints import schemes
from tests.checkpoints.weights import assert_same_tensors, weight

torch = pytest.importorskip("torch", reason="torch is not installed: pip install jaxlowprec[oracles]")
pytest.importorskip("transformers", reason="transformers is not installed")
convert = pytest.importorskip("compressed_tensors.entrypoints.convert", reason="compressed-tensors is not installed")


@pytest.mark.parametrize(("shape", "group_size"), [((24, 256), 64), ((8, 128), 128)])
def test_awq_files_become_compressed_tensors_own(shape, group_size):
    awq = schemes.by_name("awq", group_size=group_size)
    ours = schemes.by_name("w4a16_asym", group_size=group_size, scale_dtype="float16")
    w = weight(shape, "float16")
    files = {f"layer.{suffix}": torch.from_numpy(np.array(t)) for suffix, t in awq.compress(w).items()}
    converted = convert.AutoAWQConverter(group_size=group_size).process(files)
    expected = ours.compress(w)
    theirs = {suffix: converted[f"layer.{suffix}"].numpy() for suffix in expected}
    assert len(converted) == len(expected)
    assert_same_tensors(theirs, expected)
    assert_same_tensors(ours.store(awq.load(awq.compress(w))), expected)
