"""Checkpoints whose modules are in different formats: written, listed, decoded, loaded; hostile ones are refused."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxlowprec.checkpoints import TreeMapping, load, save, schemes
from jaxlowprec.checkpoints.conversion.convert import ConvertOptions, convert, dequantize
from jaxlowprec.checkpoints.conversion.inspect import inspect
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.schemes.mixed import ConfigGroup, Mixed
from jaxlowprec.checkpoints.trees.mapping import Rule
from jaxlowprec.cli.main import main
from tests.checkpoints.small_models import CONFIG, llama, read_config, read_tensors, same, write_checkpoint
from tests.checkpoints.weights import assert_same_tensors
from tests.eager import jlp

NVFP4, CHANNEL = schemes.by_name("nvfp4"), schemes.by_name("fp8_channel")
ATTENTION = "re:.*self_attn"
LAYER = "model.layers.0"
EXPERTS = f"{LAYER}.mlp.experts"


def experts(count=2):
    """A model with a layer of experts."""
    random = np.random.default_rng(1)
    shapes = {"gate_proj": (64, 128), "up_proj": (64, 128), "down_proj": (128, 64)}
    return llama(1) | {
        f"{EXPERTS}.{i}.{name}.weight": (random.standard_normal(shape) * 0.02).astype(ml_dtypes.bfloat16)
        for i in range(count)
        for name, shape in shapes.items()
    }


@pytest.fixture
def source(tmp_path):
    return write_checkpoint(tmp_path / "source", experts())


def test_each_module_in_its_scheme_and_back(source, tmp_path):
    report = convert(
        source, tmp_path / "low", NVFP4, overrides={ATTENTION: CHANNEL}, options=ConvertOptions(verify=True)
    )
    assert report.scheme == "mixed" and report.formats == {"nvfp4": 9, "fp8_channel": 4}
    tensors, low = read_tensors(source), read_tensors(tmp_path / "low")
    q = f"{LAYER}.self_attn.q_proj"
    assert same(low[f"{q}.weight"], CHANNEL.compress(tensors[f"{q}.weight"])["weight"])
    gate, up = (tensors[f"{LAYER}.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    shared = max(float(np.abs(np.float32(w)).max()) for w in (gate, up))  # fused projections still share a scale
    made = NVFP4.compress(gate, amax=shared)
    assert same(low[f"{LAYER}.mlp.gate_proj.weight_global_scale"], made["weight_global_scale"])

    found = {module.name: module for module in inspect(tmp_path / "low", source).modules}
    assert found[q].format == "fp8_channel" and found[f"{EXPERTS}.1.up_proj"].format == "nvfp4"
    assert found[q].error.sqnr_db > 30 > found[f"{EXPERTS}.1.up_proj"].error.sqnr_db > 15

    back = dequantize(tmp_path / "low", tmp_path / "back", options=ConvertOptions(verify=True))
    assert back.formats == report.formats and sorted(back.changed) == sorted(report.changed)
    high = read_tensors(tmp_path / "back")
    assert same(high[f"{q}.weight"], CHANNEL.decompress(CHANNEL.compress(tensors[f"{q}.weight"])))
    assert same(high[f"{LAYER}.mlp.gate_proj.weight"], NVFP4.decompress(made))
    assert read_config(tmp_path / "back") == CONFIG


def test_the_config_names_each_module_in_one_group(source, tmp_path):
    convert(source, tmp_path / "low", NVFP4, overrides={ATTENTION: CHANNEL})
    entry = read_config(tmp_path / "low")["quantization_config"]
    assert entry["format"] == "mixed-precision"
    targets = {group["format"]: group["targets"] for group in entry["config_groups"].values()}
    assert targets == {
        "float-quantized": [f"{LAYER}.self_attn.{p}_proj" for p in "koqv"],
        "nvfp4-pack-quantized": [
            *(f"{LAYER}.mlp.{p}_proj" for p in ("down",)),
            r"re:model\.layers\.0\.mlp\.experts\.",
            *(f"{LAYER}.mlp.{p}_proj" for p in ("gate", "up")),
        ],
    }
    read = schemes.from_config(entry)
    assert isinstance(read, Mixed)
    assert read.of_module(f"{EXPERTS}.17.up_proj") == NVFP4 and read.of_module("lm_head") is None


def test_one_format_for_all_is_no_mixture(source, tmp_path):
    convert(source, tmp_path / "low", NVFP4, overrides={"re:.*": CHANNEL})
    assert schemes.from_config(read_config(tmp_path / "low")) == CHANNEL


def test_int4_of_two_groups_sizes(source, tmp_path):
    """The same tensors, other shapes: the format is one, the config has two groups."""
    fine, coarse = (schemes.by_name("w4a16", group_size=size) for size in (32, -1))
    report = convert(source, tmp_path / "low", coarse, overrides={ATTENTION: fine}, options=ConvertOptions(verify=True))
    assert report.formats == {"w4a16": 13}
    assert read_config(tmp_path / "low")["quantization_config"]["format"] == "pack-quantized"
    dequantize(tmp_path / "low", tmp_path / "back", options=ConvertOptions(verify=True))


def test_modelopts_mixture(source, tmp_path):
    overrides = {ATTENTION: schemes.by_name("modelopt_fp8")}
    report = convert(source, tmp_path / "low", schemes.by_name("modelopt_nvfp4"), overrides=overrides)
    entry = read_config(tmp_path / "low")["quantization_config"]
    assert entry["quant_algo"] == "MIXED_PRECISION"
    assert entry["quantized_layers"][f"{LAYER}.self_attn.q_proj"] == {"quant_algo": "FP8"}
    assert entry["quantized_layers"][f"{EXPERTS}.0.up_proj"] == {"quant_algo": "NVFP4", "group_size": 16}
    low = read_tensors(tmp_path / "low")
    scales = [low[f"{LAYER}.self_attn.{p}_proj.weight_scale"] for p in "qkv"]
    assert scales[0] == scales[1] == scales[2] and scales[0].shape == ()
    assert inspect(tmp_path / "low").by_format["modelopt_fp8"][0] == 4
    assert dequantize(tmp_path / "low", tmp_path / "back").formats == report.formats


def test_modelopts_own_file_beside_a_config_that_says_nothing(source, tmp_path):
    convert(source, tmp_path / "low", schemes.by_name("modelopt_fp8"))
    config = read_config(tmp_path / "low")
    entry = config.pop("quantization_config")
    (tmp_path / "low" / "config.json").write_text(json.dumps(config))
    del entry["quant_method"]
    (tmp_path / "low" / "hf_quant_config.json").write_text(json.dumps({"quantization": entry}))
    assert inspect(tmp_path / "low").scheme == "modelopt_fp8"
    with pytest.raises(CheckpointError, match="is quantised already: its config says 'modelopt'"):
        convert(tmp_path / "low", tmp_path / "again", NVFP4)
    dequantize(tmp_path / "low", tmp_path / "back")
    assert not (tmp_path / "back" / "hf_quant_config.json").exists()


def test_keys_of_modelopts_layers_name_what_lies_in_them():
    layers = {"a.experts": {"quant_algo": "NVFP4"}, "b.*.q_proj": {"quant_algo": "FP8"}}
    mixed = schemes.from_config(
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    )
    assert mixed.of_module("a.experts.3.up_proj").name == "modelopt_nvfp4"
    assert mixed.of_module("b.7.q_proj").name == "modelopt_fp8" and mixed.of_module("a.experts_b") is None


class TestCommand:
    def test_converts(self, source, tmp_path, capsys):
        given = ["convert", str(source), str(tmp_path / "low"), "--scheme", "nvfp4"]
        assert main([*given, "--scheme-for", r"re:.*self_attn\.o=w4a16:32", f"{ATTENTION}=fp8_channel"]) == 0
        out = capsys.readouterr().out
        assert "mixed: changed 13 weights" in out and "  9 nvfp4" in out and "  1 w4a16" in out
        assert main(["inspect", str(tmp_path / "low")]) == 0
        assert "fp8_channel: 3" in capsys.readouterr().out

    @pytest.mark.parametrize(
        "given",
        ["nvfp4", "lm_head=", "lm_head=int4", "lm_head=w4a16:x", "a=w4a16:" + "9" * 5000, "=nvfp4", "re:(=nvfp4"],
    )
    def test_refuses(self, source, tmp_path, capsys, given):
        assert main(["convert", str(source), str(tmp_path / "x"), "--scheme", "mxfp4", "--scheme-for", given]) == 2
        assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "x").exists()

    def test_refuses_one_rule_twice(self, source, tmp_path, capsys):
        rules = ["a=nvfp4", "a=mxfp4"]
        assert main(["convert", str(source), str(tmp_path / "x"), "--scheme", "mxfp4", "--scheme-for", *rules]) == 2
        assert "the rule 'a' was given before" in capsys.readouterr().err


class TestRefused:
    @pytest.mark.parametrize(
        "rule", ["re:.*q_proj", f"{LAYER}.mlp.up_proj", r"re:.*experts\.1\.", r"re:.*experts.*down_proj"]
    )
    def test_fused_weights_in_different_formats(self, source, tmp_path, rule):
        with pytest.raises(CheckpointError, match="engines hold them as one weight; give both one scheme"):
            convert(source, tmp_path / "low", NVFP4, overrides={rule: CHANNEL})
        assert not (tmp_path / "low").exists()

    @pytest.mark.parametrize(("one", "other"), [("nvfp4", "gptq"), ("awq", "gptq"), ("nvfp4", "modelopt_fp8")])
    def test_schemes_that_no_config_names_together(self, source, tmp_path, one, other):
        with pytest.raises(CheckpointError, match="no config names these schemes together"):
            convert(source, tmp_path / "low", schemes.by_name(one), overrides={ATTENTION: schemes.by_name(other)})

    def test_a_mixture_as_the_scheme(self, source, tmp_path):
        mixed = Mixed((ConfigGroup(("a",), NVFP4), ConfigGroup(("b",), CHANNEL)))
        with pytest.raises(CheckpointError, match="give one of its schemes, and the others as overrides"):
            convert(source, tmp_path / "low", mixed)

    def test_a_rule_that_matches_nothing_is_said(self, source, tmp_path):
        report = convert(source, tmp_path / "low", NVFP4, overrides={"re:.*vision": CHANNEL})
        assert "rule 're:.*vision' matches no weight" in report.warnings


class TestHostile:
    @pytest.fixture
    def low(self, source, tmp_path):
        convert(source, tmp_path / "low", NVFP4, overrides={ATTENTION: CHANNEL})
        return tmp_path / "low"

    def changed(self, low, change):
        config = read_config(low)
        change(config["quantization_config"]["config_groups"])
        (low / "config.json").write_text(json.dumps(config))

    @pytest.mark.parametrize(
        ("targets", "message"),
        [
            ("Linear", "targets is 'Linear'; needs a list"),
            ([], "has no targets"),
            (None, "has no targets"),
            ([7], "target 7 is not valid"),
            ([""], "target '' is not valid"),
            (["re:("], r"target 're:\(' is not a valid regular expression"),
            (["re:a{99999999999999999999}"], "is not a valid regular expression"),
        ],
    )
    def test_bad_targets(self, low, targets, message):
        self.changed(low, lambda groups: groups["group_1"].update(targets=targets))
        for act in (inspect, lambda path: dequantize(path, path.parent / "back")):
            with pytest.raises(CheckpointError, match=rf"config.json: schemes.from_config: .*{message}"):
                act(low)

    def test_one_target_in_two_groups(self, low):
        self.changed(low, lambda groups: groups["group_0"].update(targets=groups["group_1"]["targets"]))
        with pytest.raises(CheckpointError, match="is in groups of fp8_channel and of nvfp4|nvfp4 and of fp8_channel"):
            inspect(low)

    def test_a_module_that_no_target_names(self, low):
        self.changed(low, lambda groups: groups["group_0"]["targets"].pop())
        with pytest.raises(CheckpointError, match=r"config.json: module '.*' holds .*no target .* names it; .*such as"):
            inspect(low)

    def test_a_module_in_the_wrong_group(self, low):
        def swap(groups):
            groups["group_0"]["targets"], groups["group_1"]["targets"] = (
                groups["group_1"]["targets"],
                groups["group_0"]["targets"],
            )

        self.changed(low, swap)
        with pytest.raises(CheckpointError, match=r"module '.*' has .*; (nvfp4|fp8_channel) also needs"):
            inspect(low)

    @pytest.mark.parametrize("strategy", ["row", 3, None, "attn_head", ["channel"]])
    def test_unknown_strategies(self, low, strategy):
        self.changed(low, lambda groups: [g["weights"].update(strategy=strategy) for g in groups.values()])
        with pytest.raises(CheckpointError, match="strategy is .*; supported is 'block' or 'channel' or 'tensor'"):
            inspect(low)

    def test_a_group_for_activations_only_is_no_format(self, low):
        self.changed(low, lambda groups: groups.update(kv={"targets": ["LlamaAttention"], "weights": None}))
        assert inspect(low).scheme == "mixed"


class TestTrees:
    """`load` and `save` take each leaf in its own scheme."""

    MAPPING = TreeMapping(
        (Rule("a.kernel", "m.a.weight"), Rule("b.kernel", "m.b.weight"), Rule("c.kernel", "m.c.weight"))
    )
    MIXED = Mixed(
        (
            ConfigGroup(("m.a",), NVFP4),
            ConfigGroup(("m.b",), schemes.by_name("fp8_tensor")),
        )
    )

    def tree(self):
        x = jax.random.normal(jax.random.key(0), (64, 32), "bfloat16")
        return {
            "a": {"kernel": jlp.quantize(x, jlp.NVFP4(), axis=-2)},
            "b": {"kernel": jlp.quantize(x, jlp.Float8Tensor(), axis=-2)},
            "c": {"kernel": x},
        }

    def test_there_and_back(self, tmp_path):
        tree = self.tree()
        save(tmp_path / "low", tree, self.MAPPING, CONFIG, scheme=self.MIXED)
        assert read_config(tmp_path / "low")["quantization_config"]["ignore"] == ["m.c"]
        assert inspect(tmp_path / "low").by_format.keys() == {"nvfp4", "fp8_tensor", "BF16"}
        loaded = load(tmp_path / "low", tree, self.MAPPING)
        assert jax.tree.structure(loaded) == jax.tree.structure(tree)
        for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(tree), strict=True):
            assert same(np.asarray(a), np.asarray(b))

    @pytest.mark.parametrize("name", ["int8_channel", "fp8_channel", "w4a8"])
    def test_scales_of_rows_load(self, tmp_path, name):
        scheme = schemes.by_name(name)
        w = np.random.default_rng(0).normal(size=(32, 256)).astype(ml_dtypes.bfloat16)
        tensors = scheme.compress(w)
        config = CONFIG | {"quantization_config": scheme.quantization_config([])}
        like = {"a": {"kernel": jax.ShapeDtypeStruct((256, 32), "bfloat16")}}
        named = {f"m.a.{k}": v for k, v in tensors.items()}
        kernel = load(write_checkpoint(tmp_path / "low", named, shards=1, config=config), like, self.MAPPING)["a"]
        assert_same_tensors(scheme.store(kernel["kernel"].mT), tensors)

    def test_an_array_in_no_scheme(self):
        q = jlp.quantize(np.ones((32, 64), np.float32), jlp.MXFP8())
        with pytest.raises(ValueError, match="q has format MXFP8.*; there are nvfp4, fp8_tensor"):
            self.MIXED.store(q)

    def test_tensors_in_no_scheme(self):
        with pytest.raises(ValueError, match=r"fit none of the checkpoint's schemes \(nvfp4.*; fp8_tensor.*\)"):
            self.MIXED.load({"weight": np.ones((3, 4), np.int8)})

    @pytest.mark.parametrize("what", ["format", "has_tensor_scale"])
    def test_what_only_a_module_has(self, what):
        with pytest.raises(ValueError, match=f"mixed.{what}: modules are in different formats; .*of_module"):
            getattr(self.MIXED, what)
