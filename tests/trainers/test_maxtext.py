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
warnings.simplefilter("ignore", DeprecationWarning)
names = {"__name__": "example", "differences": {}}
printed = [printed_by(piece, sys.argv[1], names) for piece in pieces(sys.argv[1])]
exec(sys.argv[2], names)
print("\\n" + json.dumps([printed, names["differences"]]))
"""
_ADAPTED = """
from maxtext.utils import lora_utils
from tests.checkpoints.small_models import merged

def compare(name, base, adapter, theirs):
    folders = {"base": base, "merged": merged(base, adapter, pathlib.Path(kept.name, name))}
    differences[name] = {which: float(abs(decoders.load(at)(tokens) - theirs).max()) for which, at in folders.items()}

def other(name, content, *more):
    more = "lora.enable_lora=true lora.lora_rank=3 lora.lora_alpha=6 base_output_directory=unused".split() + list(more)
    config = pyconfig.initialize(["", BASE, *SETTINGS, "dtype=float32", *more])
    model = model_creation_utils.from_config(config, rngs=nnx.Rngs(0))
    base, adapter = (served.parent / f"{name} {kind}" for kind in ("base", "adapter"))
    mapping = mapping_for(content, "maxtext")
    save(base, nnx.to_pure_dict(nnx.state(model, nnx.Param)), mapping, content, dtype="float32")
    with jax.set_mesh(model.mesh), logical_axis_rules(config.logical_axis_rules):
        model = lora_utils.apply_lora_to_model(model, model.mesh, config)
    for number, (_, half) in enumerate(nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))):
        half[...] = jax.numpy.sin(number + jax.numpy.arange(half.size)).reshape(half.shape) / 8
    save_adapters(adapter, mapping.adapters(model), rank=3, alpha=6)
    compare(name, base, adapter, logits(model, config, tokens))

compare("page", served, served.parent / "adapter", logits(adapted, config, tokens))
other("Qwen3", published, "scan_layers=false")
llama = published | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
llama |= {"rms_norm_eps": 1e-5, "rope_theta": 5e5}
llama["rope_scaling"] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
llama["rope_scaling"]["original_max_position_embeddings"] = 8192
other("Llama 3", llama, "model_name=llama3.1-8b")
gemma = published | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "tie_word_embeddings": True}
gemma |= {"num_hidden_layers": 8, "query_pre_attn_scalar": 32, "rope_local_base_freq": 1e4, "sliding_window": 512}
gemma |= {"sliding_window_pattern": 6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
other("Gemma 3", gemma, "model_name=gemma3-4b", "base_num_decoder_layers=8")
"""
MODELS = {"page": 1e-4, "Qwen3": 1e-4, "Llama 3": 1e-4, "Gemma 3": 2e-2}
"""With a bound of the difference of logits: MaxText rounds the operands of a tied head to bfloat16."""


@pytest.fixture(scope="module")
def said():
    """(what the pieces print, one after the other; by model, differences from MaxText's logits with adapters).

    MaxText changes JAX's settings, so a process of its own runs them.
    """
    return json.loads(run_python("-c", _RUN, PAGE, _ADAPTED).stdout.splitlines()[-1])


@pytest.mark.parametrize("number", range(len(PIECES)), ids=lambda number: f"line_{PIECES[number].line}")
def test_a_piece_prints_what_the_page_shows(said, number):
    piece = PIECES[number]
    ours = _MAXTEXTS.sub("", said[0][number])
    assert not differs(ours, piece.shown), f"{PAGE}:{piece.line}: prints\n{ours}"


@pytest.mark.parametrize("model", MODELS)
def test_a_folder_that_takes_up_the_adapters_has_the_logits(said, model):
    differences = said[1][model]
    assert differences["merged"] < MODELS[model] < 0.5 < differences["base"], differences


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
