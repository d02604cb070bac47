"""docs/how-to/maxtext.md: its programs with the real package, where that is."""

import json
import re

import pytest

from tests.docs.pages import differs, pieces
from tests.helpers import run_python

pytest.importorskip("maxtext")

PAGE = "docs/how-to/maxtext.md"
PIECES = pieces(PAGE)
# Lines that MaxText prints itself.
_MAXTEXTS = re.compile(r"^(\[DECOUPLED|Per train step:| Total TFLOPs:| split as ).*\n", re.MULTILINE)
_RUN = """
import json, sys, warnings
from tests.docs.pages import pieces, printed_by
from tests.checkpoints.small_models import merged
warnings.simplefilter("ignore", DeprecationWarning)
names = {"__name__": "example"}
printed = [printed_by(piece, sys.argv[1], names) for piece in pieces(sys.argv[1])]
base, theirs = names["served"], names["logits"](names["adapted"], names["config"], names["tokens"])
folders = {"base": base, "merged": merged(base, base.parent / "adapter", base.parent / "merged")}
ours = {name: names["decoders"].load(folder)(names["tokens"]) for name, folder in folders.items()}
differences = {name: float(abs(array - theirs).max()) for name, array in ours.items()}
print("\\n" + json.dumps([printed, differences]))
"""


@pytest.fixture(scope="module")
def said():
    """(what the pieces print, one after the other; differences of logits with adapters from MaxText's).

    MaxText changes JAX's settings, so a process of its own runs them.
    """
    return json.loads(run_python("-c", _RUN, PAGE).stdout.splitlines()[-1])


@pytest.mark.parametrize("number", range(len(PIECES)), ids=lambda number: f"line_{PIECES[number].line}")
def test_a_piece_prints_what_the_page_shows(said, number):
    piece = PIECES[number]
    ours = _MAXTEXTS.sub("", said[0][number])
    assert not differs(ours, piece.shown), f"{PAGE}:{piece.line}: prints\n{ours}"


def test_a_folder_that_takes_up_the_adapters_has_the_logits(said):
    assert said[1]["merged"] < 1e-4 < 0.5 < said[1]["base"]


def test_it_trains_on_a_mesh_and_accumulates_gradients():
    mesh = "ici_data_parallelism=2 ici_fsdp_parallelism=2 ici_tensor_parallelism=2 gradient_accumulation_steps=2"
    code = PIECES[0].code.replace("steps=10", f"steps=2 {mesh}")
    assert mesh in code
    said = run_python("-c", code, XLA_FLAGS="--xla_force_host_platform_device_count=8").stdout
    plain, quantised = (
        [float(loss) for loss in re.findall(r"\d\.\d", line)]
        for line in re.findall("^(?:MaxText|NVFP4): .*", said, re.M)
    )
    assert plain[0] - plain[1] > 0.5 and quantised == pytest.approx(plain, abs=0.2)
