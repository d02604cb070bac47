"""compressed-tensors reads what is written here to the same bits, and writes what is read here."""

import json

import ml_dtypes
import numpy as np
import pytest

from jaxlowprec.checkpoints import schemes
from jaxlowprec.checkpoints.schemes import mixed
from tests.checkpoints.weights import assert_same_tensors, weight
from tests.eager import jlp
from tests.helpers import as_bytes

torch = pytest.importorskip("torch", reason="torch is not installed: pip install jaxlowprec[oracles]")
compressors = pytest.importorskip("compressed_tensors.compressors", reason="compressed-tensors is not installed")
quantization = pytest.importorskip("compressed_tensors.quantization")
dequantize = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward").dequantize
infer_module_format = pytest.importorskip("compressed_tensors.compressors.format").infer_module_format
match_targets = pytest.importorskip("compressed_tensors.utils.match").match_targets
helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")

FORMATS = (
    "w4a16",
    "w4a16_asym",
    "nvfp4",
    "nvfp4_w4a4",
    "mxfp4",
    "mxfp8",
    "fp8_block",
    "fp8_channel",
    "fp8_tensor",
    "int8_channel",
    "w4a8",
    "w4afp8",
    "mxfp4_fp8",
)
TORCH = {
    "bfloat16": (np.int16, torch.bfloat16),
    "float8_e4m3fn": (np.uint8, torch.float8_e4m3fn),
}


def to_torch(array):
    array = np.array(array)
    if array.dtype.name in TORCH:
        bits, dtype = TORCH[array.dtype.name]
        return torch.from_numpy(array.view(bits)).view(dtype)
    return torch.from_numpy(array)


def to_numpy(tensor):
    tensor = tensor.detach().contiguous()
    for name, (_, dtype) in TORCH.items():
        if tensor.dtype == dtype:
            bits = torch.int16 if name == "bfloat16" else torch.uint8
            return tensor.view(bits).numpy().view(getattr(ml_dtypes, name))
    return tensor.numpy()


def scheme_of(config):
    """Their QuantizationScheme, from the configuration that we write."""
    group = quantization.QuantizationConfig.model_validate(config).config_groups["group_0"]
    return group, compressors.BaseCompressor.get_value_from_registry(config["format"])


def decompressed(scheme, tensors):
    group, compressor = scheme_of(scheme.quantization_config([]))
    return to_numpy(compressor.decompress({n: to_torch(t) for n, t in tensors.items()}, group)["weight"])


class TestPacking:
    @pytest.mark.parametrize(("rows", "columns"), [(3, 32), (3, 8), (5, 13), (1, 1), (2, 35)])
    def test_words_along_either_axis(self, rows, columns):
        q = np.random.default_rng(0).integers(-8, 8, (rows, columns), np.int8)
        codes = (q + 8).astype(np.uint8)
        theirs = helpers.pack_to_int32(torch.from_numpy(q), 4)
        np.testing.assert_array_equal(theirs.numpy(), schemes.int4.pack_words(codes))
        down = helpers.pack_to_int32(torch.from_numpy(q), 4, packed_dim=0)
        np.testing.assert_array_equal(down.numpy(), schemes.int4.pack_words(codes.T).T)
        back = helpers.unpack_from_int32(theirs, 4, torch.Size((rows, columns)))
        np.testing.assert_array_equal(back.numpy() + 8, schemes.int4.unpack_words(theirs.numpy(), columns))


class TestDecompress:
    @pytest.mark.parametrize("name", FORMATS)
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_their_weight_is_ours(self, name, dtype):
        scheme = schemes.by_name(name)
        for shape in ((16, 256), (200, 384)):
            tensors = scheme.compress(weight(shape, dtype))
            theirs = decompressed(scheme, tensors)
            np.testing.assert_array_equal(as_bytes(theirs), as_bytes(scheme.decompress(tensors, theirs.dtype)))

    @pytest.mark.parametrize("rule", ["four_over_six", "four_over_six_mse", "search"])
    def test_scales_that_were_chosen_are_plain_nvfp4(self, rule):
        """By the scheme, and of a weight that a layer trained by that rule."""
        w, scheme, plain = weight((64, 256)), schemes.by_name("nvfp4", scale_rule=rule), schemes.by_name("nvfp4")
        tensors = scheme.compress(w)
        assert scheme.quantization_config([]) == plain.quantization_config([])
        theirs = decompressed(plain, tensors)
        np.testing.assert_array_equal(as_bytes(theirs), as_bytes(plain.decompress(tensors, theirs.dtype)))
        given = jlp.quantize(w, jlp.NVFP4(scale_rule=rule))
        assert_same_tensors(plain.store(given), tensors)
        closer, usual = (
            np.square(np.float32(s.decompress(s.compress(w), "float32") - np.float32(w))).sum() for s in (scheme, plain)
        )
        assert closer < 0.9 * usual

    @pytest.mark.parametrize("factor", [1, 1.3, 0.77, 5.21, 0.031])
    def test_nvfp4_in_float32(self, factor):
        """Their arithmetic without the rounding to bfloat16 that ends it."""
        scheme = schemes.by_name("nvfp4")
        tensors = scheme.compress(weight((64, 256), "float32") * np.float32(factor))
        group, _ = scheme_of(scheme.quantization_config([]))
        codes = compressors.nvfp4.unpack_fp4_from_uint8(to_torch(tensors["weight_packed"]), 64, 256, torch.float32)
        scales = to_torch(tensors["weight_scale"]).float(), to_torch(tensors["weight_global_scale"])
        theirs = dequantize(codes, scales[0], args=group.weights, dtype=torch.float32, global_scale=scales[1])
        np.testing.assert_array_equal(as_bytes(theirs.numpy()), as_bytes(scheme.decompress(tensors, "float32")))

    @pytest.mark.parametrize("name", ["w4a16", "w4a16_asym"])
    @pytest.mark.parametrize(("shape", "group_size"), [((13, 36), 12), ((9, 39), 13), ((9, 64), 64)])
    def test_sizes_that_do_not_fill_words(self, name, shape, group_size):
        scheme = schemes.by_name(name, group_size=group_size)
        tensors = scheme.compress(weight(shape))
        np.testing.assert_array_equal(as_bytes(decompressed(scheme, tensors)), as_bytes(scheme.decompress(tensors)))

    @pytest.mark.parametrize("name", ["w4a16", "w4a16_asym"])
    @pytest.mark.parametrize("shape", [(16, 256), (13, 37)])
    def test_groups_of_rows(self, name, shape):
        scheme = schemes.by_name(name, group_size=-1)
        tensors = scheme.compress(weight(shape))
        group, _ = scheme_of(scheme.quantization_config([]))
        assert (group.weights.strategy, group.weights.group_size) == ("channel", None)
        np.testing.assert_array_equal(as_bytes(decompressed(scheme, tensors)), as_bytes(scheme.decompress(tensors)))

    def test_tiles_that_are_partly_filled(self):
        scheme = schemes.by_name("fp8_block")
        tensors = scheme.compress(weight((200, 200)))
        theirs = decompressed(scheme, tensors)
        np.testing.assert_array_equal(as_bytes(theirs), as_bytes(scheme.decompress(tensors, theirs.dtype)))


class TestCompress:
    """Their compressor, given our scales."""

    @pytest.mark.parametrize("name", ["w4a16", "w4a16_asym"])
    @pytest.mark.parametrize(("shape", "group_size"), [((16, 256), 128), ((13, 36), 12), ((5, 39), 13)])
    def test_int4_words(self, name, shape, group_size):
        scheme = schemes.by_name(name, group_size=group_size)
        ours = scheme.compress(weight(shape))
        group, compressor = scheme_of(scheme.quantization_config([]))
        decoded = scheme.decompress(ours, "float32")
        state = {"weight": to_torch(decoded), "weight_scale": to_torch(ours["weight_scale"]).float()}
        loaded = scheme.load(ours)
        if loaded.zero_point is not None:
            state["weight_zero_point"] = torch.from_numpy(np.asarray(loaded.zero_point).astype(np.int8) - np.int8(8))
        theirs = compressor.compress(state, group)
        assert set(theirs) == set(ours)
        for suffix in set(ours) - {"weight_scale"}:
            assert theirs[suffix].numpy().dtype == ours[suffix].dtype
            np.testing.assert_array_equal(theirs[suffix].numpy(), ours[suffix], suffix)

    @pytest.mark.parametrize("name", ["fp8_channel", "int8_channel"])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    def test_scales_and_codes_of_rows_are_theirs(self, name, dtype):
        """Their codes of float32 copies: in float32 they divide as their kernels do, and as we do."""
        w, scheme = weight((64, 256), dtype), schemes.by_name(name)
        ours = scheme.compress(w)
        group, compressor = scheme_of(scheme.quantization_config([]))
        x = torch.from_numpy(w) if dtype == "float16" else to_torch(w)
        scale, _ = quantization.utils.calculate_qparams(
            x.amin(-1, keepdim=True), x.amax(-1, keepdim=True), group.weights
        )
        np.testing.assert_array_equal(scale.float().numpy(), ours["weight_scale"].astype(np.float32))
        theirs = compressor.compress({"weight": x.float(), "weight_scale": scale.float()}, group)["weight"]
        assert to_numpy(theirs).dtype == ours["weight"].dtype
        np.testing.assert_array_equal(as_bytes(to_numpy(theirs)), as_bytes(ours["weight"]))

    @pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8", "fp8_block", "fp8_tensor"])
    def test_our_decoded_weight_has_our_bytes(self, name):
        scheme = schemes.by_name(name)
        ours = scheme.compress(weight((16, 256)))
        group, compressor = scheme_of(scheme.quantization_config([]))
        scale = ours["weight_scale"]
        numbers = np.exp2(scale.astype(np.float32) - 127) if scale.dtype == np.uint8 else scale.astype(np.float32)
        live = np.ones((16, 256), bool)
        if name == "nvfp4":  # a block that is scaled by 0 has no quotient
            live = np.repeat(numbers > 0, 16, axis=1)
        state = {"weight": to_torch(scheme.decompress(ours, "float32")), "weight_scale": torch.from_numpy(numbers)}
        if "weight_global_scale" in ours:
            state["weight_global_scale"] = torch.from_numpy(ours["weight_global_scale"])
        theirs = {suffix: to_numpy(tensor) for suffix, tensor in compressor.compress(state, group).items()}
        assert {s: (t.dtype, t.shape) for s, t in theirs.items()} == {s: (t.dtype, t.shape) for s, t in ours.items()}
        np.testing.assert_array_equal(as_bytes(theirs["weight_scale"]), as_bytes(scale))
        given, made = (scheme.decompress(t, "float32") for t in (ours, theirs))
        np.testing.assert_array_equal(made[live], given[live])


class TestScales:
    @pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
    def test_mx_scales_are_theirs_to_the_byte(self, name):
        w = weight((32, 256))
        w[0], w[3] = w[4], w[5]  # no zeros: they take their logarithm
        scheme = schemes.by_name(name)
        group, compressor = scheme_of(scheme.quantization_config([]))
        blocks = to_torch(w).unflatten(-1, (-1, 32))
        scale, zero = quantization.utils.calculate_qparams(blocks.amin(-1), blocks.amax(-1), group.weights)
        theirs = compressor.compress({"weight": to_torch(w), "weight_scale": scale, "weight_zero_point": zero}, group)
        ours = scheme.compress(w)["weight_scale"]
        amax = abs(w.astype(np.float32)).reshape(32, 8, 32).max(-1)
        tie = (np.frexp(amax)[0] == 0.875) & (name == "mxfp8")  # 1.75 times a power of two: they round up
        np.testing.assert_array_equal(to_numpy(theirs["weight_scale"]), ours + tie)

    def test_the_global_scale_is_theirs(self):
        w = weight((16, 256))
        theirs = quantization.utils.generate_gparam(to_torch(w).float().amin(), to_torch(w).float().amax())
        np.testing.assert_array_equal(theirs.numpy(), schemes.by_name("nvfp4").compress(w)["weight_global_scale"])

    def test_what_they_write_as_nvfp4_loads_and_stores_exactly(self):
        w = weight((16, 256))
        scheme = schemes.by_name("nvfp4")
        group, compressor = scheme_of(scheme.quantization_config([]))
        x = to_torch(w).float()
        gparam = quantization.utils.generate_gparam(x.amin(), x.amax())
        blocks = x.unflatten(-1, (-1, 16))
        scale, _ = quantization.utils.calculate_qparams(blocks.amin(-1), blocks.amax(-1), group.weights, gparam)
        state = {"weight": x, "weight_scale": scale, "weight_global_scale": gparam}
        theirs = compressor.compress(state, group)
        tensors = {suffix: to_numpy(theirs[suffix]) for suffix in scheme.required}
        stored = scheme.store(scheme.load(tensors))
        for suffix, tensor in tensors.items():
            np.testing.assert_array_equal(as_bytes(stored[suffix]), as_bytes(tensor), suffix)
        decoded = compressor.decompress(theirs, group)["weight"]
        np.testing.assert_array_equal(as_bytes(to_numpy(decoded)), as_bytes(scheme.decompress(tensors)))


class TestMixed:
    """Which scheme a module has, where targets overlap."""

    TARGETS = (
        ("model.layers.0.mlp.up_proj", "re:.*mlp.*"),
        ("Linear",),
        ("re:.*mlp.up_proj", "re:.*self_attn.*", "re:model.layers.1.*"),
        ("model.layers.1.self_attn.q_proj",),
    )
    NAMES = ("nvfp4", "mxfp8", "fp8_channel", "int8_channel")
    MODULES = [
        f"model.layers.{i}.{m}"
        for i in range(2)
        for m in ("mlp.up_proj", "mlp.down_proj", "self_attn.q_proj", "self_attn.o_proj", "other")
    ]

    @pytest.mark.parametrize("name", FORMATS)
    def test_a_group_without_a_format_has_the_one_that_they_infer(self, name):
        config = mixed.Mixed(
            (
                mixed.ConfigGroup(("a",), schemes.by_name(name)),
                mixed.ConfigGroup(("b",), schemes.by_name("w4a16", group_size=16)),
            )
        ).quantization_config([])
        group, config["format"] = config["config_groups"]["group_0"], "mixed-precision"
        said = group.pop("format")
        parsed = quantization.QuantizationConfig.model_validate(json.loads(json.dumps(config)))
        inferred = infer_module_format(torch.nn.Linear, parsed.config_groups["group_0"]).value
        if name == "w4afp8":  # vLLM reads it packed only
            assert inferred == "int-quantized"
            with pytest.raises(ValueError, match="input_activations are .*'float'"):
                schemes.from_config(config)
            return
        assert inferred == said
        assert schemes.from_config(config).of_module("a") == schemes.by_name(name)

    @pytest.mark.parametrize("seed", range(4))
    def test_targets_have_their_precedence(self, seed):
        order = np.random.default_rng(seed).permutation(4)
        groups = tuple(mixed.ConfigGroup(self.TARGETS[i], schemes.by_name(self.NAMES[i])) for i in order)
        config = mixed.Mixed(groups).quantization_config(["lm_head"])
        parsed = quantization.QuantizationConfig.model_validate(json.loads(json.dumps(config)))
        assert parsed.format == "mixed-precision"
        theirs = {target: group.format for group in parsed.config_groups.values() for target in group.targets}
        ours, linear = schemes.from_config(config), torch.nn.Linear(1, 1)
        for module in self.MODULES:
            first = match_targets(module, linear, theirs)[0]
            own = ours.of_module(module)
            assert own is not None
            assert own.quantization_config([])["format"] == theirs[first], module


def test_scales_of_activations_are_theirs():
    """Within the last bit: torch multiplies by the reciprocal. And their module has a place for them."""
    scheme = schemes.by_name("nvfp4_w4a4")
    module = torch.nn.Linear(32, 4)
    quantization.initialize_module_for_quantization(module, scheme_of(scheme.quantization_config([]))[0])
    held = dict(module.named_parameters())["input_global_scale"]
    assert (str(held.dtype), tuple(held.shape)) == (
        "torch.float32",
        scheme.output_specs((4, 32))["input_global_scale"][1],
    )
    amaxes = np.exp2(np.random.default_rng(0).uniform(-20, 20, 500)).astype(np.float32)
    for amax in amaxes:
        theirs = quantization.utils.generate_gparam(torch.tensor(-amax), torch.tensor(amax / 2))
        tensors = scheme.of_inputs(float(amax)).compress(np.ones((1, 16), np.float32))
        np.testing.assert_array_max_ulp(theirs.numpy(), tensors["input_global_scale"])


class TestConfig:
    @pytest.mark.parametrize("name", FORMATS)
    def test_they_accept_it_and_find_the_same_format(self, name):
        config = schemes.by_name(name).quantization_config(["lm_head", "re:.*self_attn.*"])
        parsed = quantization.QuantizationConfig.model_validate(json.loads(json.dumps(config)))
        assert parsed.format == config["format"]
        assert parsed.ignore == ["lm_head", "re:.*self_attn.*"]
        compressor = compressors.BaseCompressor.get_value_from_registry(config["format"])
        accepted = compressor.can_compress(torch.nn.Linear, parsed.config_groups["group_0"])
        assert accepted == (name != "w4afp8")  # packed, it is read, but not written by them

    @pytest.mark.parametrize(
        ("name", "preset"),
        [
            ("w4a16", "W4A16"),
            ("w4a16_asym", "W4A16_ASYM"),
            ("nvfp4", "NVFP4A16"),
            ("nvfp4_w4a4", "NVFP4"),
            ("mxfp4", "MXFP4A16"),
            ("mxfp8", "MXFP8"),
            ("fp8_block", "FP8_BLOCK"),
            ("fp8_channel", "FP8_DYNAMIC"),
            ("fp8_tensor", "FP8"),
            ("int8_channel", "W8A8"),
            ("w4a8", "W4A8"),
            ("w4afp8", "W4AFP8"),
            ("mxfp4_fp8", "MXFP4XFP8"),
        ],
    )
    def test_it_says_what_their_preset_says(self, name, preset):
        options = {"activations": "static"} if preset == "FP8" else {}
        ours, _ = scheme_of(schemes.by_name(name, **options).quantization_config([]))
        theirs = quantization.preset_name_to_scheme(preset, ["Linear"])
        left_open = {"weights": {"observer", "observer_kwargs"}, "input_activations": {"observer", "observer_kwargs"}}
        assert ours.model_dump(exclude={"format": True, **left_open}) == theirs.model_dump(
            exclude={"format": True, **left_open}
        )

    @pytest.mark.parametrize("name", FORMATS)
    def test_we_read_their_own(self, name):
        config = schemes.by_name(name).quantization_config(["lm_head"])
        parsed = quantization.QuantizationConfig.model_validate(config)
        dumped = json.loads(parsed.model_dump_json())
        assert schemes.from_config({"quantization_config": dumped}) == schemes.by_name(name)
