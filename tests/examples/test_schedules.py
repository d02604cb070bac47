"""Runs of the examples that change their recipe on the way: what a name means, and in which phase a run goes on."""

import time

import pytest
from lm import training
from lm.model import SIZES
from lm.recipes import RECIPES, TAIL, run_named

import jaxlowprec as jlp
from tests.examples.test_mesh import TEXT, Interrupted, UntilStep

STEPS, CHANGED = 10, "nvfp4:4:nvfp4-bf16-forward"


class TestNames:
    def test_of_one_recipe_mean_that_recipe(self):
        assert run_named("nvfp4", 10) == training.Run("nvfp4", jlp.NVFP4BlockScaling())

    def test_of_several_mean_a_schedule(self):
        run = run_named(TAIL, 1000)
        assert [run.at(step) for step in (0, 799)] == [jlp.NVFP4BlockScaling()] * 2
        assert run.at(800) == run.at(999) == jlp.NVFP4BlockScaling(forward_override="high_precision")
        assert run.folder == "nvfp4-0.8-nvfp4-bf16-forward"
        by_steps = run_named("bf16:40:nvfp4:900:bf16", 1000)
        assert [by_steps.at(step) for step in (39, 40, 899, 900)] == [None, *[RECIPES["nvfp4"]()] * 2, None]

    @pytest.mark.parametrize("name", ["fp3", "", "nvfp4:", "nvfp4:0.8", "nvfp4:0.8:fp3", "nvfp4:soon:bf16"])
    def test_that_mean_nothing_say_what_is_needed(self, name):
        with pytest.raises(ValueError, match=f"^{name}: .*needs one of bf16, nvfp4"):
            run_named(name, 10)


def trained(name, folder, last=None, resume=False):
    """What `train` returns of a short run, which is saved where it is stopped."""
    schedule = training.Schedule(STEPS, 1e-3, 2, 0, checkpoint_every=last or STEPS, validation_batches=1)
    batches = UntilStep(TEXT, 2, SIZES["tiny"].context, 0)
    batches.last = last
    return training.train(run_named(name, STEPS), SIZES["tiny"], schedule, batches, folder, resume)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was not stopped."""
    return trained(CHANGED, tmp_path_factory.mktemp("whole"))


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [4, *(pytest.param(step, marks=pytest.mark.every_case) for step in (2, 7))])
def test_a_run_goes_on_in_the_phase_of_its_step(whole, tmp_path, stopped):
    """Stopped where the phase changes. Before and after that: tests/distributed/test_preemption.py."""
    with pytest.raises(Interrupted):
        trained(CHANGED, tmp_path, last=stopped)
    while [saved.name for saved in (tmp_path / "checkpoints").iterdir()] != [str(stopped)]:
        time.sleep(0.01)  # it is written in the background
    resumed = trained(CHANGED, tmp_path, resume=True)
    assert resumed["losses"] == whole["losses"] and resumed["validation_loss"] == whole["validation_loss"]
    assert "forward_override='high_precision'" in resumed["recipe"]


@pytest.mark.slow
def test_a_phase_changes_the_losses_from_its_first_step_on(whole, tmp_path):
    plain = trained("nvfp4", tmp_path)["losses"]
    assert [a == b for a, b in zip(plain, whole["losses"], strict=True)] == [True] * 4 + [False] * 6
