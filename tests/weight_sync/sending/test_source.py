"""Names, order and bytes of what a trainer sends."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxlowprec.checkpoints import QWEN3_MOE
from jaxlowprec.checkpoints.conversion.convert import convert
from jaxlowprec.checkpoints.conversion.rules import DEFAULTS, Rules
from jaxlowprec.checkpoints.files.folder import CheckpointFolder
from jaxlowprec.checkpoints.schemes import by_name
from jaxlowprec.checkpoints.trees import trees
from jaxlowprec.weight_sync import WeightSource
from jaxlowprec.weight_sync.bucket import entry_of
from jaxlowprec.weight_sync.manifest import described
from tests.checkpoints.weights import SCHEMES
from tests.eager import jlp
from tests.helpers import run_python
from tests.sharding.meshes import mesh_of
from tests.weight_sync.trees import MAPPING, llama

RULES = Rules(defaults=DEFAULTS)
over_schemes = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


def folder_tensors(path):
    with CheckpointFolder(path) as folder:
        return {name: folder.read(name).copy() for name in folder.shard_of}


def assert_same(actual, expected):
    assert sorted(actual) == sorted(expected)
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape), name
        assert actual[name].tobytes() == tensor.tobytes(), name


def kernels_quantised(tree, scheme):
    """The tree with the linears of its layers quantised along K."""

    def fill(keys, leaf):
        path = jax.tree_util.keystr(keys)
        return jlp.quantize(leaf, scheme.format, axis=-2) if "proj" in path and "kernel" in path else leaf

    return jax.tree_util.tree_map_with_path(fill, tree)


@over_schemes
def test_what_is_sent_is_what_a_conversion_writes(scheme, tmp_path):
    tree = llama()
    trees.save(tmp_path / "high", tree, MAPPING, {"model_type": "llama"})
    convert(tmp_path / "high", tmp_path / "low", scheme)
    source = WeightSource(tree, MAPPING, scheme, quantize=RULES)
    assert_same(dict(source.arrays()), folder_tensors(tmp_path / "low"))


@pytest.mark.parametrize("name", ["w4a16", "nvfp4"])
def test_experts_are_sent_as_a_conversion_writes_them(name, tmp_path):
    """One leaf [E, K, N] is many bundles: each expert's gate and up together, its down by itself."""
    random = np.random.default_rng(0)
    sizes = {"gate_proj": (3, 64, 128), "up_proj": (3, 64, 128), "down_proj": (3, 128, 64)}
    experts = {n: {"kernel": jax.device_put(random.standard_normal(s).astype(jnp.bfloat16))} for n, s in sizes.items()}
    tree = {"layers": [{"mlp": {"router": {"kernel": np.ones((64, 3), np.float32)}, "experts": experts}}]}
    scheme = by_name(name, group_size=32) if name == "w4a16" else by_name(name)
    trees.save(tmp_path / "high", tree, QWEN3_MOE, {"model_type": "qwen3_moe"})
    convert(tmp_path / "high", tmp_path / "low", scheme)
    source = WeightSource(tree, QWEN3_MOE, scheme, quantize=RULES)
    assert_same(dict(source.arrays()), folder_tensors(tmp_path / "low"))
    prefix = "model.layers.0.mlp"
    assert [bundle.key for bundle in source.bundles] == [
        *(f"{prefix}.experts.{e}.{part}" for e in range(3) for part in ("down_proj", "gate_proj+up_proj")),
        f"{prefix}.gate",
    ]


@pytest.mark.sampled(3)
@over_schemes
def test_what_is_sent_is_what_saving_a_quantised_tree_writes(scheme, tmp_path):
    tree = kernels_quantised(llama(), scheme)
    trees.save(tmp_path / "low", tree, MAPPING, {}, scheme=scheme, dtype="float32")
    source = WeightSource(tree, MAPPING, scheme, "float32")
    assert_same(dict(source.arrays()), folder_tensors(tmp_path / "low"))


@over_schemes
def test_the_manifest_says_beforehand_what_will_be_made(scheme):
    source = WeightSource(llama(), MAPPING, scheme, quantize=RULES)
    assert source.manifest.entries == tuple(entry_of(name, array) for name, array in source.arrays())
    assert by_name(**source.manifest.scheme) == scheme


def test_a_master_weight_is_quantised_from_its_own_dtype():
    tree, scheme = llama(dtype=np.float32), by_name("mxfp8")
    sent = dict(WeightSource(tree, MAPPING, scheme, "bfloat16", quantize=RULES).arrays())
    kernel = tree["layers"][0]["mlp"]["up_proj"]["kernel"]
    expected = scheme.compress(np.ascontiguousarray(kernel.T))["weight"].view(np.uint8)
    rounded = scheme.compress(np.ascontiguousarray(kernel.T.astype(ml_dtypes.bfloat16)))["weight"].view(np.uint8)
    assert (sent["model.layers.0.mlp.up_proj.weight"].view(np.uint8) == expected).all()
    assert (expected != rounded).any()
    assert sent["model.norm.weight"].dtype == ml_dtypes.bfloat16


def test_projections_that_an_engine_fuses_have_one_global_scale():
    source = WeightSource(llama(), MAPPING, by_name("nvfp4"), quantize=RULES)
    sent = dict(source.arrays())

    def scales(at, names):
        return {float(sent[f"model.layers.0.{at}.{n}_proj.weight_global_scale"][0]) for n in names}

    assert len(scales("self_attn", "qkv")) == len(scales("mlp", ("gate", "up"))) == 1
    assert len(scales("self_attn", "qko")) == 2


def test_order_and_hash_depend_on_the_names_alone():
    tree = llama(layers=11)
    backwards = {name: tree[name] for name in reversed(tree)}
    as_dict = {**backwards, "layers": {f"{i}": layer for i, layer in reversed(list(enumerate(tree["layers"])))}}
    sources = [WeightSource(t, MAPPING) for t in (tree, backwards, as_dict)]
    assert len({source.manifest.hash for source in sources}) == 1
    names = [entry.name for entry in sources[0].manifest.entries]
    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert layers == sorted(layers) and max(layers) == 10


def test_the_hash_tells_names_dtypes_shapes_and_schemes_apart():
    tree = {"up_proj": {"kernel": np.zeros((32, 64), np.float32)}}
    others = [
        {"down_proj": tree["up_proj"]},
        {"up_proj": {"kernel": np.zeros((64, 32), np.float32)}},
        {"up_proj": {"kernel": np.zeros((32, 64), np.int32)}},
    ]
    hashes = {WeightSource(t).manifest.hash for t in (tree, *others)}
    manifest = WeightSource(llama(), MAPPING, by_name("w4a16"), quantize=RULES).manifest
    float16 = described(by_name("w4a16", scale_dtype="float16"))
    assert len(hashes) == 4
    assert dataclasses.replace(manifest, scheme=float16).hash != manifest.hash


def test_what_must_arrive_together_is_one_group():
    source = WeightSource(llama(layers=1), MAPPING, by_name("w4a16_asym"), quantize=RULES)
    bundle_of = {entry.name: bundle.key for bundle in source.bundles for entry in bundle.entries}
    at = "model.layers.0"
    qkv = {bundle_of[name] for name in bundle_of if any(f"{at}.self_attn.{p}_proj" in name for p in "qkv")}
    gate_up = {bundle_of[f"{at}.mlp.{p}_proj.{t}"] for p in ("gate", "up") for t in source_parts()}
    down = {bundle_of[f"{at}.mlp.down_proj.{t}"] for t in source_parts()}
    assert [len(found) for found in (qkv, gate_up, down)] == [1, 1, 1]
    assert len(qkv | gate_up | down) == 3


def source_parts():
    return ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")


def test_without_a_mapping_leaves_are_called_by_their_paths():
    quantised = jlp.quantize(jnp.ones((64, 32), jnp.bfloat16), jlp.NVFP4(), axis=-2)
    source = WeightSource({"params": {"q_proj": {"kernel": quantised}, "k_proj": {"kernel": np.ones(3, np.float32)}}})
    (bundle,) = source.bundles
    assert bundle.key == "q_proj+k_proj+v_proj"
    assert [entry.name for entry in bundle.entries] == [
        "k_proj.kernel",
        "q_proj.kernel.amax",
        "q_proj.kernel.data",
        "q_proj.kernel.scale",
    ]


def test_sharded_arrays_are_sent_whole_and_keep_nothing():
    mesh = mesh_of((4, 2))
    numbers = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    specs = {"x": ("a", "b"), "y": (None, "a"), "z": (), "u": (("b", "a"),)}
    tree = {n: jax.device_put(numbers, NamedSharding(mesh, PartitionSpec(*s))) for n, s in specs.items()}
    for name, sent in WeightSource(tree).arrays():
        assert (sent == numbers).all(), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scheme": by_name("w4a16")}, "pass mapping="),
        ({"mapping": MAPPING, "quantize": RULES}, "needs scheme="),
        ({"mapping": MAPPING, "scheme": by_name("w4a16", group_size=96), "quantize": RULES}, "cannot hold .*columns"),
        (
            {"mapping": MAPPING, "scheme": by_name("w4a16"), "quantize": Rules((r"re:.*\.up_proj",))},
            "engines hold them as one",
        ),
    ],
)
def test_what_cannot_be_sent_is_refused_when_the_source_is_made(arguments, message):
    with pytest.raises(ValueError, match=message):
        WeightSource(llama(), **arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mapping": {"model_type": "llama"}}, TypeError, r"mapping=\{.*; needs a TreeMapping, such as .*mapping_for"),
        ({"mapping": MAPPING, "scheme": "w4a16"}, TypeError, r"scheme='w4a16'; needs a scheme, such as .*by_name"),
        (
            {"mapping": MAPPING, "scheme": by_name("w4a16"), "quantize": True},
            TypeError,
            r"quantize=True; needs Rules, which say what is left alone",
        ),
        ({"dtype": "bf16"}, TypeError, r"dtype='bf16'; needs a dtype such as bfloat16"),
        ({"mapping": MAPPING, "dtype": "int8"}, ValueError, r"dtype=int8; needs bfloat16, .*, or None"),
    ],
)
def test_an_argument_of_another_kind_is_refused_at_once(arguments, error, message):
    with pytest.raises(error, match=f"WeightSource: {message}"):
        WeightSource(llama(), **arguments)


@pytest.mark.sampled(3)
@over_schemes
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_an_error_that_names_it(scheme, wrong):
    tree = llama()
    tree["layers"][1]["mlp"]["up_proj"]["kernel"][5, 7] = wrong
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.(gate|up)_proj\.kernel: .*finite"):
        list(WeightSource(tree, MAPPING, scheme, quantize=RULES).arrays())


@pytest.mark.slow
def test_a_tree_of_numpy_arrays_starts_no_backend():
    run_python(
        "-c",
        """
import jax, numpy as np
jax.config.update("jax_platforms", "no such platform")
from jaxlowprec.weight_sync import InProcess, Receiver, WeightSource, push
receiver = Receiver()
push(WeightSource({"a": np.ones(5)}), InProcess(receiver))
assert receiver.weights["a"].sum() == 5
""",
    )
