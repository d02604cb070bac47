"""What training_study.py --on-gpu needs: a text that is split by file, and runs that go on where their time was up."""

import argparse
import dataclasses
import sysconfig

import numpy as np
import pytest
from lm import study
from lm.data import Batches, installed_text
from lm.model import SIZES
from lm.preemption import Notice, Preempted
from lm.recipes import run_named

CONFIG = dataclasses.replace(SIZES["tiny"], layers=1, high_precision_last=0)


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """200 files, half of which have the content of another."""
    for i in range(200):
        file = tmp_path / ("stdlib" if i % 3 else "site") / f"package{i % 7}" / f"module{i}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"<{i // 2:03}>")
    (tmp_path / "site" / "data.txt").write_text("no source")
    paths = {"stdlib": str(tmp_path / "stdlib"), "purelib": str(tmp_path / "site"), "platlib": str(tmp_path / "site")}
    monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)


def test_the_text_has_each_content_once_and_is_split_by_file(packages):
    text, split = installed_text()
    files = [bytes(file).decode() for file in np.split(text, len(text) // 5)]
    assert sorted(files) == [f"<{i:03}>" for i in range(100)]
    assert files != sorted(files)  # neighbours in a package are none in the text
    assert split % 5 == 0 and 0 < len(text) - split < len(text) / 4
    batches = Batches(text, 2, 10, 0, split=split)
    assert bytes(batches.training) + bytes(batches.validation) == bytes(text)
    assert len(batches.training) == split


@pytest.mark.slow
def test_runs_go_on_where_their_time_was_up(tmp_path):
    text = np.random.default_rng(0).choice(np.frombuffer(b"the low bits of a block\n", np.uint8), 1 << 16)

    def results(folder, notice):
        options = argparse.Namespace(out=tmp_path / folder, seeds=1, batch=2, learning_rate=1e-3, split=None)
        sides = [(run, CONFIG) for run in (study.BASELINES[0], run_named("mxfp8", 4))]
        return study.results_of(options, text, 4, sides, notice=notice)

    class AfterTwoSteps(Notice):
        asked = 0

        def reached(self, layout):
            self.asked += 1
            return self.asked > 2

    with pytest.raises(Preempted, match="bf16 after 2 of 4 steps"):
        results("parts", AfterTwoSteps())
    with pytest.raises(Preempted, match="bf16 after 2 of 4 steps"):
        results("parts", Notice(seconds=0))
    found, whole = results("parts", Notice()), results("whole", None)
    for one, other in zip(found, whole, strict=True):
        assert (one["name"], one["losses"]) == (other["name"], other["losses"])
        assert one["validation_loss"] == other["validation_loss"]
