"""The language model of the examples over eight devices: where its arrays are, and that it learns as on one device.

Sums over a split axis meet in another order, so losses agree to float32's rounding, as long as nothing rounds harder
afterwards. Quantising does: once an addend differs in its last bit, codes at a rounding boundary flip. Two such runs
part as two runs do whose initial parameters differ a little, and that is the bound: the example's own noise floor.
Which step parts furthest is chance: the bound is of all steps' mean square, and the floor is that of several runs.
"""

import dataclasses
import functools
import json
import time

import jax
import numpy as np
import pytest
import train_lm
from jax.sharding import PartitionSpec as P
from lm import mesh, training
from lm.data import Batches
from lm.model import SIZES
from lm.recipes import RECIPES

BATCH, STEPS = 8, 12
IN_FLOAT32 = dataclasses.replace(SIZES["tiny"], dtype="float32")
ONE_BLOCK = dataclasses.replace(IN_FLOAT32, layers=1, high_precision_last=0)
WIDE = dataclasses.replace(ONE_BLOCK, width=128)  # as wide as the groups of INT4
CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
# The cube without sequence parallelism: the tests of bfloat16, of experts and of checkpoints.
MESHES = [(CUBE, True), ({"fsdp": 8}, False), ({"data": 8}, False), ({"fsdp": 2, "tensor": 4}, True)]
TEXT = np.random.default_rng(0).choice(np.frombuffer(b"the low bits of a block\n", np.uint8), 1 << 16)
FLOAT32 = 1e-6  # eight units in the last place of a loss
PERTURBATIONS = (1e-4, -1e-4, 2e-4)
FLIPPED = 5e-6  # the few codes that flip in a first step; a perturbation by 1e-4 moves its loss by ten times that


def layout_of(sizes, sequence_parallel=False):
    return mesh.Layout(mesh.make_mesh(dict.fromkeys(mesh.AXES, 1) | sizes), sequence_parallel)


class Interrupted(Exception):
    """Ends a run before a step."""


class UntilStep(Batches):
    """Batches that end."""

    last = None

    def train(self, step):
        if step == self.last:
            raise Interrupted
        return super().train(step)


def trained(
    recipe, layout, folder, steps=STEPS, config=ONE_BLOCK, perturbation=0.0, resume=False, last=None, every=STEPS
):
    """What `train` returns of a short run."""
    schedule = training.Schedule(steps, 1e-3, BATCH, 0, every, validation_batches=2)
    run = training.Run(recipe, RECIPES[recipe](), perturbation)
    batches = UntilStep(TEXT, BATCH, config.context, 0, layout.rows(BATCH))
    batches.last = last
    return training.train(run, config, schedule, batches, folder, resume, layout)


def difference(run, other):
    """The largest relative difference of the losses, that of the first step and that of validation."""
    of_steps = np.abs(np.array(run["losses"]) / np.array(other["losses"]) - 1)
    return of_steps.max(), of_steps[0], abs(run["validation_loss"] / other["validation_loss"] - 1)


def parted(run, other):
    """The root mean square of the relative differences of the losses, validation's among them."""
    losses = [np.array([*each["losses"], each["validation_loss"]]) for each in (run, other)]
    return np.sqrt(np.mean((losses[0] / losses[1] - 1) ** 2))


def noise_floor(on_one_device, recipe, **options):
    """How far runs from perturbed initial parameters part from the one that starts from the exact ones."""
    one = on_one_device(recipe, **options)
    return max(parted(on_one_device(recipe, perturbation=size, **options), one) for size in PERTURBATIONS)


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory):
    """Runs on one device, each once."""

    @functools.cache
    def run(recipe, **options):
        return trained(recipe, mesh.ONE_DEVICE, tmp_path_factory.mktemp("one"), **options)

    return run


class TestLosses:
    @pytest.mark.slow
    @pytest.mark.parametrize(("sizes", "sequence_parallel"), MESHES, ids=str)
    def test_in_high_precision_are_those_of_one_device(self, sizes, sequence_parallel, on_one_device, tmp_path):
        run = trained("bf16", layout_of(sizes, sequence_parallel), tmp_path)
        assert max(difference(run, on_one_device("bf16"))) < FLOAT32

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("sizes", "sequence_parallel"),
        [MESHES[0], *(pytest.param(*mesh, marks=pytest.mark.every_case) for mesh in MESHES[1:])],
        ids=str,
    )
    def test_under_a_recipe_part_no_more_than_perturbed_runs(self, sizes, sequence_parallel, on_one_device, tmp_path):
        options = {"config": IN_FLOAT32, "steps": 20}
        one = on_one_device("nvfp4", **options)
        run = trained("nvfp4", layout_of(sizes, sequence_parallel), tmp_path, **options)
        floor = noise_floor(on_one_device, "nvfp4", **options)
        _, first, _ = difference(run, one)
        assert first < FLIPPED and parted(run, one) < 2 * floor < 0.005


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8_block", "int4_qat"])
def test_other_recipes_start_alike(name, on_one_device, tmp_path):
    """Of each other kind of scale one: fp8_delayed's checkpoints are continued below. The products of every recipe on
    meshes: tests/layers/test_linear_parallel.py."""
    one = on_one_device(name, steps=4, config=WIDE)
    largest, first, _ = difference(trained(name, layout_of(CUBE, True), tmp_path, steps=4, config=WIDE), one)
    assert first < FLIPPED and largest < 5e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", ["nvfp4", *(pytest.param(name, marks=pytest.mark.every_case) for name in ("fp8_delayed", "bf16"))]
)
def test_experts_start_alike_and_their_kernels_are_split(recipe, on_one_device, tmp_path):
    """Later a token whose logits are all but equal goes to another expert, and the runs part."""
    config = dataclasses.replace(ONE_BLOCK, experts=4)
    layout = layout_of(CUBE)
    one = on_one_device(recipe, steps=4, config=config)
    run = trained(recipe, layout, tmp_path, steps=4, config=config)
    largest, first, _ = difference(run, one)
    assert first < (FLOAT32 if recipe == "bf16" else FLIPPED) and largest < 5e-3
    assert run["expert_loads"][0] == one["expert_loads"][0]
    with layout.scope():
        _, parameters = training.initial_parameters(config, training.Run(recipe), 0, layout)
    experts = parameters["blocks"][0]["moe"]["experts"]
    assert experts["up_proj"]["kernel"].get_value().sharding.spec == P(None, "fsdp", "tensor")
    assert experts["down_proj"]["kernel"].get_value().sharding.spec == P(None, "tensor", "fsdp")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["nvfp4", pytest.param("bf16", marks=pytest.mark.every_case)])
def test_bfloat16_activations_part_no_more_than_perturbed_runs(recipe, on_one_device, tmp_path):
    """XLA rounds a fused bfloat16 intermediate or not, depending on what it fuses: from the first step on."""
    config = dataclasses.replace(SIZES["tiny"], layers=1, high_precision_last=0)
    one = on_one_device(recipe, config=config)
    floor = noise_floor(on_one_device, recipe, config=config)
    run = trained(recipe, layout_of(CUBE), tmp_path, config=config)
    assert parted(run, one) < max(2 * floor, 1e-3) < 0.005


@pytest.mark.slow
def test_parameters_and_state_are_made_where_they_belong():
    layout = layout_of(CUBE)
    run = training.Run("fp8_delayed", RECIPES["fp8_delayed"]())
    transformation = training.optimizer(training.Schedule(4, 1e-3, BATCH, 0, 4))
    with layout.scope():
        _, parameters = training.initial_parameters(IN_FLOAT32, run, 0, layout)
        state = layout.create(transformation.init, parameters)
    block = parameters["blocks"][0]
    assert block["qkv"]["kernel"].get_value().sharding.spec == P("fsdp", "tensor")
    assert block["up"]["kernel"].get_value().sharding.spec == P("fsdp", "tensor")
    assert block["out"]["kernel"].get_value().sharding.spec == P("tensor", "fsdp")
    assert block["down"]["kernel"].get_value().sharding.spec == P("tensor", "fsdp")
    for leaf in jax.tree.leaves(block["qkv"]["_overwrite_with_gradient"]):
        assert leaf.sharding.is_fully_replicated
    specs = {
        jax.tree_util.keystr(path[-6:]): leaf.sharding.spec
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if "down" in jax.tree_util.keystr(path) and "kernel" in jax.tree_util.keystr(path)
    }
    assert set(specs.values()) == {P("tensor", "fsdp")} and len(specs) >= 2  # both moments


def test_batches_are_the_same_arrays_split_over_data_and_fsdp():
    layout, rows = layout_of(CUBE), np.arange(BATCH * 5, dtype=np.int32).reshape(BATCH, 5)
    placed = layout.place(rows, BATCH)
    assert placed.sharding.spec == P(("data", "fsdp")) and (layout.rows(BATCH) == np.arange(BATCH)).all()
    np.testing.assert_array_equal(placed, rows)
    some = Batches(TEXT, BATCH, 32, 0, np.array([2, 5]))
    np.testing.assert_array_equal(some.train(3), Batches(TEXT, BATCH, 32, 0).train(3)[[2, 5]])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16", pytest.param("nvfp4", marks=pytest.mark.every_case), "fp8_delayed"])
def test_a_checkpoint_goes_on_on_any_mesh(recipe, on_one_device, tmp_path):
    """Saved on 2 x 2 x 2, resumed on 8 and then on one device: the losses of a run that nothing interrupted."""
    options = {"every": 4, "folder": tmp_path, "resume": True}
    for step, layout in ((4, layout_of(CUBE)), (8, layout_of({"fsdp": 8}))):
        with pytest.raises(Interrupted):
            trained(recipe, layout, last=step, **options)
        while [saved.name for saved in (tmp_path / "checkpoints").iterdir()] != [str(step)]:
            time.sleep(0.01)  # it is written, and the one before removed, in the background
        log = tmp_path / "losses.json"
        log.write_text(
            json.dumps([-1.0 * step, *json.loads(log.read_text())[1:]])
        )  # a run from the start loses the mark
    resumed, whole = trained(recipe, mesh.ONE_DEVICE, **options), on_one_device(recipe)
    assert resumed["losses"][0] == -8
    resumed["losses"][0] = whole["losses"][0]
    if recipe == "bf16":
        assert max(difference(resumed, whole)) < FLOAT32
    else:
        assert parted(resumed, whole) < 2 * noise_floor(on_one_device, recipe) < 0.005


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mesh", "model=2"), "'model=2' is none of data=N, fsdp=N, tensor=N"),
        (("--mesh", "data=0"), "'data=0' is none of data=N"),
        (("--mesh", "data=3"), "--batch 8 is not a multiple of data * fsdp = 3"),
        (("--mesh", "tensor=3"), "4 heads are not a multiple of tensor = 3"),
        (("--mesh", "fsdp=3", "--batch", "9"), "the width 128 is not a multiple of fsdp = 3"),
        (("--sequence-parallel",), "--sequence-parallel needs --mesh"),
        (("--mesh", "data=4,tensor=4"), "needs 16 devices, there are 8 of cpu"),
    ],
)
def test_a_wrong_mesh_is_named(tmp_path, refused_by, arguments, message):
    assert message in refused_by(train_lm.main, "--out", tmp_path, *arguments)
