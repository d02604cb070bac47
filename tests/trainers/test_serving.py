"""vLLM computes from the folders of the trainers' pages what the trained models compute.

A page's program runs in this environment, which has its trainer, and vLLM in its own: see `live_vllm`.
"""

import importlib.util
import json

import jax
import numpy as np
import pytest

from jaxlowprec import checkpoints
from tests.checkpoints.small_models import merged
from tests.helpers import run_python
from tests.weight_sync.engines import live_vllm, models

pytestmark = pytest.mark.slow

TOKENS = [(7 * i + 3) % 256 for i in range(32)]  # without 0, which gemma takes for padding
RUN = """
import json, pathlib, sys, warnings
import numpy as np
from tests.docs.pages import pieces
warnings.simplefilter("ignore", DeprecationWarning)
page, code, place = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
names = {"__name__": "example"}
for number in json.loads(sys.argv[5]):
    piece = pieces(page)[number].code
    for before, after in json.loads(sys.argv[6]).items():
        piece = piece.replace(before, after)
    exec(piece, names)
names |= {"place": place, "tokens": np.array([json.loads(sys.argv[4])]), "own": {}}
exec(code, names)
np.savez(place / "logits.npz", **{name: np.asarray(array[0], np.float32) for name, array in names["own"].items()})
"""
TUNIX = """
saved(model, place / "bfloat16")
saved_adapters(adapted, place / "adapter")
mask = jnp.ones_like(tokens, bool)
batch = jnp.asarray(tokens), utils.build_positions_from_mask(mask), None, utils.make_causal_attn_mask(mask)
own |= {"bfloat16": model(*batch)[0], "bfloat16, adapted": adapted(*batch)[0]}
"""
MAXTEXT = """
import shutil

def left(name, config, params, *more):
    save(place / name, params, mapping_for(config, "maxtext"), config, dtype="bfloat16")
    own[name] = logits(*loaded(params, *more), tokens)

left("bfloat16", published, params)
shutil.copytree(pathlib.Path(kept.name, "adapter"), place / "adapter")
own["bfloat16, adapted"] = logits(adapted, config, tokens)
sparse = published | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "moe_intermediate_size": 256}
sparse |= {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1}
sparse["rope_theta"] = 1e7  # as that of MaxText's qwen3-30b-a3b
left("experts", sparse, trained(place / "sparse", *experts), *experts)
"""
LEVANTER = """
overrides = export.config_overrides | {"max_position_embeddings": 128}  # what vLLM is asked for
export = dataclasses.replace(export, output_dir=str(place / "bfloat16"), config_overrides=overrides)
export = dataclasses.replace(export, export_dtype="bfloat16")
with contextlib.chdir(folder):
    export_lm_to_hf.main(export)
with settings.use_device_mesh():
    own["bfloat16"] = logits(last.state.model, hax.named(tokens.astype("int32"), ("batch", "position")))
"""
GEMMA = """
save(place / "bfloat16", params, mapping_for(published, "flax_gemma"), published, dtype="bfloat16")
own["bfloat16"] = exact.apply({"params": jax.tree.map(jnp.float32, params)}, tokens).logits
"""
WIDER = {'"head_dim": 16': '"head_dim": 32', '"query_pre_attn_scalar": 16': '"query_pre_attn_scalar": 32'}
TRAINERS: dict[str, tuple[str, tuple[int, ...], dict[str, str]]] = {
    "tunix": (TUNIX, (1, 3, 6, 7), {}),
    "maxtext": (MAXTEXT, (0, 1, 5, 6), {}),
    "levanter": (LEVANTER, (0, 1), {"hidden_dim=64": "hidden_dim=128"}),
    "gemma": (GEMMA, (0, 1), WIDER),
}
"""By name: code to run after pieces of its page, which these are (the model, LoRA, and folders), and what is replaced
in them: vLLM's attention needs heads of 32 on CPUs."""
BOUNDS = {
    "bfloat16": 0.1,
    "experts": 0.1,
    "bfloat16, adapted": 0.1,
    "w4a16": 0.1,
    "w4a16, adapted": 0.1,
    "fp8_channel": 0.6,
}
"""The largest difference of a log-probability, in deviations of all. vLLM 0.32 has half of it."""


@pytest.fixture(scope="module", params=TRAINERS)
def trained(request, tmp_path_factory):
    """(the folder in which the page's program has left folders, the trainer's own log-probabilities by their names)."""
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is missing")
    place = tmp_path_factory.mktemp(request.param)
    code, numbers, replaced = TRAINERS[request.param]
    page = f"docs/how-to/{request.param}.md"
    run_python("-c", RUN, page, code, str(place), json.dumps(TOKENS), json.dumps(numbers), json.dumps(replaced))
    with np.load(place / "logits.npz") as logits:
        own = {name: np.asarray(jax.nn.log_softmax(logits[name]))[:-1] for name in logits}
    return place, own


@pytest.fixture(scope="module")
def folders(trained):
    """By name: the folder that vLLM serves, or a pair with an adapter; and the one that our decoder reads."""
    place, own = trained
    plain, adapter = place / "bfloat16", place / "adapter"
    made = {"bfloat16": (plain, plain)}
    for name, options in (("w4a16", {"group_size": 32}), ("fp8_channel", {})):
        checkpoints.convert(plain, place / name, checkpoints.schemes.by_name(name, **options))
        made[name] = place / name, place / name
    if (place / "experts").exists():
        made["experts"] = place / "experts", place / "experts"
    if adapter.exists():
        checkpoints.dequantize(place / "w4a16", place / "decoded")
        made["bfloat16, adapted"] = (plain, adapter), merged(plain, adapter, place / "merged")
        made["w4a16, adapted"] = (place / "w4a16", adapter), merged(place / "decoded", adapter, place / "w4a16 merged")
    return made


@pytest.fixture(scope="module")
def served(folders, tmp_path_factory):
    """By name: vLLM's log-probabilities."""
    live_vllm.interpreter()
    asked = [of_vllm for of_vllm, _ in folders.values()]
    answers = live_vllm.ask(asked, TOKENS, 1, tmp_path_factory.mktemp("vllm"))
    return {name: prompt for name, (prompt, _) in zip(folders, answers, strict=True)}


def largest_difference(ours, theirs):
    """In deviations of the log-probabilities."""
    return np.abs(ours - theirs).max() / ours.std()


def decoded(folder, name):
    """Our decoder's log-probabilities."""
    return models.log_probabilities(models.decoder(folder), TOKENS, name)[: len(TOKENS) - 1]


def test_our_decoder_computes_what_the_trainer_computes(trained, folders):
    for name, ours in trained[1].items():
        assert largest_difference(ours, decoded(folders[name][1], name)) < BOUNDS[name], name


def test_vllm_computes_what_the_trainer_computes(trained, served):
    for name, ours in trained[1].items():
        assert largest_difference(ours, served[name]) < BOUNDS[name], name


def test_vllm_computes_what_our_decoder_computes(folders, served):
    for name, (_, folder) in folders.items():
        assert largest_difference(decoded(folder, name), served[name]) < BOUNDS[name], name


def test_an_adapter_changes_what_vllm_computes(folders, served):
    adapted = [name for name in folders if name.endswith(", adapted")]
    if not adapted:
        pytest.skip("the page has no adapters")
    for name in adapted:
        assert largest_difference(served[name], served[name.partition(",")[0]]) > 10 * BOUNDS[name], name
