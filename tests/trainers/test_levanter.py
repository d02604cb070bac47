"""docs/how-to/levanter.md: its program with the real package, where that is."""

import importlib.util

import pytest

from tests.docs.pages import differs, pieces
from tests.helpers import run_python

if importlib.util.find_spec("levanter") is None:
    pytest.skip("levanter is missing", allow_module_level=True)

PAGE = "docs/how-to/levanter.md"
PIECES = pieces(PAGE)
TRAINING = PIECES[0]
OF_THE_CLASS = "WrappedLossFunction.__call__"


def changed(**lines):
    """The page's training with other text in some places, each of which it has once."""
    code = TRAINING.code
    for before, after in lines.values():
        assert code.count(before) == 1, before
        code = code.replace(before, after)
    return code


def test_the_program_prints_what_the_page_shows():
    printed = run_python("-c", "".join(piece.code for piece in PIECES)).stdout
    assert not differs(printed, "".join(piece.shown for piece in PIECES)), printed


def test_the_commands_line_on_a_mesh_does_the_same():
    """Parameters and batches on eight devices, in microbatches; the state keeps its tree, shapes and dtypes."""
    code = changed(
        imports=("import Trainer,", "import WrappedLossFunction, Trainer,"),
        mesh=(
            "    train_batch_size=16,\n",
            "    train_batch_size=16,\n    mesh=MESH,\n    per_device_parallelism=2,\n",
        ),
        line=("trainer.loss_fn = jlp.quantize_matmuls(trainer.loss_fn, rules)", LINE),
        explained=("trainer.loss_fn, jlp.FROM_CONTEXT,", f"{OF_THE_CLASS}, jlp.FROM_CONTEXT, trainer.loss_fn,"),
        steps=("float(step.loss))", "float(step.loss) if types(step.state) == types(state) else None)"),
    )
    printed = run_python("-c", MESH + code, XLA_FLAGS="--xla_force_host_platform_device_count=8").stdout
    assert not differs(printed, TRAINING.shown), printed


LINE = f'{OF_THE_CLASS} = jlp.quantize_matmuls({OF_THE_CLASS}, rules, params="model")'
MESH = """
from levanter.utils.mesh import MeshConfig
MESH = MeshConfig(axes={"data": -1, "replica": 1, "model": 2})
def types(state):
    return jax.tree.structure(state), [(x.shape, x.dtype) for x in jax.tree.leaves(state)]
"""
