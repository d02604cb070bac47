"""supported: whether a recipe runs on a platform, and what computes it there."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import pytest

import jaxlowprec as jlp
from jaxlowprec.cli.main import main
from jaxlowprec.diagnostics import support
from jaxlowprec.wiring import native
from tests.cuda_without_gpu.claiming_cuda import claiming_cuda, custom_calls
from tests.helpers import run_python
from tests.products import native_calls

RECIPES = {
    "NVFP4": jlp.NVFP4BlockScaling(),
    "MXFP8": jlp.MXFP8BlockScaling(fp8_format="HYBRID"),
    "FP8 block": jlp.Float8BlockScaling(),
    "FP8 current": jlp.Float8CurrentScaling(),
    "FP8 delayed": jlp.DelayedScaling(),
    "INT4": jlp.Int4QAT(),
    "NVFP4 weights": jlp.WeightQAT(jlp.NVFP4(), include=("mlp/",)),
}
X, W = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16), jax.ShapeDtypeStruct((256, 256), jnp.float32)


def of(recipe):
    return pytest.mark.parametrize("recipe", recipe.values(), ids=recipe.keys())


def gradients(recipe, x, w):
    """What a training step computes in one layer."""
    state = jlp.delayed_scaling.init_state(recipe) if recipe.delayed else None

    def loss(x, w):
        y = jlp.linear(x, w, recipe=recipe, state=state, name="mlp/up")
        return (y if state is None else y[0]).astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1))(x, w)


class TestOnTheCpu:
    @of(RECIPES)
    def test_kernels_that_are_named_are_called(self, recipe, isa):
        ok, why = jlp.supported(recipe)
        assert ok and f"{isa} kernels" in why and "reference" not in why
        assert native_calls(functools.partial(gradients, recipe), X, W)

    def test_each_gemm_is_named(self):
        why = jlp.supported(jlp.Float8CurrentScaling()).reason
        assert "fprop Float8Tensor E4M3 by Float8Tensor E4M3, dgrad Float8Tensor E5M2 by Float8Tensor E4M3" in why
        high = jlp.supported(jlp.MXFP8BlockScaling(backward_override="high_precision"), platform="cpu").reason
        assert "dgrad and wgrad in high precision: XLA" in high and "fprop MXFP8" in high

    def test_one_op_alone(self):
        recipe = jlp.NVFP4BlockScaling()
        assert "fprop" not in jlp.supported(recipe, op="quantize").reason
        assert "quantize" not in jlp.supported(recipe, op="scaled_matmul").reason
        for op in ("dequantize", "fake_quantize", "hadamard_transform"):
            assert jlp.supported(recipe, op=op).reason.startswith(f"cpu: {op} NVFP4 1x16")
        assert jlp.supported(recipe, op="grouped_matmul").supported
        ok, why = jlp.supported(jlp.Int8RowScaling(), op="grouped_matmul")
        assert ok and "exact integer dot products" in why and "reference" not in why

    def test_without_the_library_the_reference_runs(self):
        code = "import jaxlowprec as jlp; print(jlp.supported(jlp.NVFP4BlockScaling()))"
        said = run_python("-c", code, JAXLOWPREC_DISABLE_NATIVE="1").stdout
        assert "supported=True" in said
        assert "the reference in pure JAX, because JAXLOWPREC_DISABLE_NATIVE is set" in said

    def test_a_kernel_that_the_library_lacks_is_named(self, monkeypatch):
        module = native.library().module
        stripped = type("Module", (), {"cpu_handlers": staticmethod(dict), "isa": module.isa})
        library = dataclasses.replace(native.library(), module=stripped)
        monkeypatch.setattr(native, "library", lambda: library)
        why = jlp.supported(jlp.NVFP4BlockScaling(), op="quantize").reason
        assert "because the compiled library has no jaxlowprec_quantize" in why

    def test_high_precision(self):
        assert jlp.supported(None) == (True, "cpu: nothing is quantised: XLA's products in high precision")
        for recipe in (jlp.Custom(lambda role: None), jlp.PerLayer((("head", None),), jlp.Custom(lambda role: None))):
            assert "nothing is quantised" in jlp.supported(recipe).reason
        with jlp.autocast(jlp.DelayedScaling(), calibrating=True):
            assert "nothing is quantised" in jlp.supported(jlp.current_recipe()).reason


TILES = jlp.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1)


class TestRefused:
    """The reason is the error that the layer raises."""

    @pytest.mark.parametrize(
        ("recipe", "op", "message"),
        [
            (TILES, "grouped_matmul", "square tiles"),
            (jlp.Custom(lambda r: jlp.MXFP8() if r.tensor_type == "input" else jlp.NVFP4()), None, "there is no GEMM"),
            (
                jlp.Custom(lambda r: jlp.MXFP8() if r.tensor_type == "input" else jlp.NVFP4()),
                "grouped_matmul",
                "no GEMM",
            ),
            (jlp.Custom(lambda r: jlp.Int4()), None, "no GEMM of integers"),
        ],
    )
    def test_a_recipe_that_no_layer_can_follow(self, recipe, op, message):
        ok, why = jlp.supported(recipe, op=op)
        assert not ok and message in why
        with pytest.raises((ValueError, TypeError, NotImplementedError)) as raised:
            if op:
                jlp.grouped_matmul(jnp.ones((256, 256)), jnp.ones((1, 256, 256)), [256], recipe=recipe)
            else:
                gradients(recipe, jnp.ones((256, 256)), jnp.ones((256, 256)))
        assert why.endswith(str(raised.value))

    def test_of_per_layer_the_rule_is_named(self):
        rules = (".*head", None), (".*/in", TILES), (".*/out", jlp.DelayedScaling())
        recipe = jlp.PerLayer(rules, default=jlp.NVFP4BlockScaling())
        ok, why = jlp.supported(recipe)
        assert ok and "DelayedScaling: quantize" in why and "NVFP4BlockScaling: quantize" in why
        ok, why = jlp.supported(recipe, op="grouped_matmul")
        assert not ok and why.startswith("cpu: Float8BlockScaling: grouped_matmul")
        assert "DelayedScaling" not in why and "NVFP4BlockScaling" not in why

    def test_bad_arguments(self):
        with pytest.raises(TypeError, match="supported: recipe='nvfp4'; needs a recipe such as"):
            jlp.supported("nvfp4")
        with pytest.raises(ValueError, match='supported: platform=\'cud\'; needs None, "cpu", "cuda"'):
            jlp.supported(None, platform="cud")
        with pytest.raises(ValueError, match="supported: op='quantise'; needs None, \"quantize\""):
            jlp.supported(None, op="quantise")


class TestOnGpus:
    def test_without_a_gpu_it_says_what_is_needed(self):
        if native.compute_capability() is not None:
            pytest.skip("a GPU is here")
        for platform in ("gpu", "cuda"):
            ok, why = jlp.supported(jlp.NVFP4BlockScaling(), platform=platform)
            assert not ok and "JAX finds no NVIDIA GPU" in why and 'pip install "jax[cuda13]"' in why
            assert (native.why_not("cuda") or "") in why

    @pytest.mark.parametrize("platform", ["tpu", "rocm"])
    def test_a_platform_that_is_not_there(self, platform):
        ok, why = jlp.supported(jlp.NVFP4BlockScaling(), platform=platform)
        assert not ok and why.startswith(f"{platform}: ") and "install JAX's backend" in why

    def test_the_plan_of_each_generation(self):
        ways = {
            "NVFP4": {8.0: "decoded to bfloat16", 9.0: "decoded to bfloat16", 10.0: "FP4 tensor cores"},
            "MXFP8": {8.0: "decoded to bfloat16", 9.0: "decoded to bfloat16", 10.0: "FP8 tensor cores, scales of 32"},
            "FP8 block": {
                8.0: "decoded",
                9.0: "FP8 tensor cores, scales of 128",
                10.0: "FP8 tensor cores, scales of 32",
            },
            "FP8 current": {8.0: "decoded to bfloat16", 9.0: "FP8 tensor cores, by", 10.0: "FP8 tensor cores, by"},
            "INT4": {9.0: "codes decoded in registers; others: XLA's GEMM"},
        }
        for name, found in ways.items():
            for capability, way in found.items():
                with claiming_cuda(capability):
                    ok, why = jlp.supported(RECIPES[name], platform="gpu")
                assert ok and way in why and "CUDA kernels" in why, (name, capability)
                assert why.startswith(f"GPU of compute capability {capability}: ")

    @pytest.mark.parametrize("capability", [8.0, 9.0])
    def test_a_gemm_by_xla_calls_no_kernel(self, capability):
        """Float32 scales that are not powers of two: only compute capability 9.0 has a GEMM."""
        recipe = jlp.Float8BlockScaling(use_f32_scales=True)
        with claiming_cuda(capability):
            ok, why = jlp.supported(recipe, platform="cuda")
            calls = {call.target for call in custom_calls(functools.partial(gradients, recipe), X, W)}
        by_xla = "XLA's product of float32 at the highest precision, because FP8 blocks with float32 scales" in why
        assert ok and by_xla == (capability == 8.0)
        assert ("jaxlowprec_scaled_matmul" in calls) != by_xla

    def test_a_gpu_that_is_too_old(self):
        with claiming_cuda(7.5):
            ok, why = jlp.supported(jlp.MXFP8BlockScaling(), platform="cuda")
        assert not ok and "the CUDA kernels need 8.0 or newer" in why and "JAXLOWPREC_DISABLE_NATIVE=1" in why

    @pytest.mark.parametrize("weight", [jlp.Int4(), jlp.MXFP4((32, 32))], ids=str)
    def test_integers_by_4_bits(self, weight):
        """A kernel of the library's own: cuBLASLt has none."""
        with claiming_cuda(8.0):
            own = support.runs("scaled_matmul", "cuda", (jlp.Int8Rows(), weight))
            integers = support.runs("scaled_matmul", "cuda", (jlp.Int8Rows(), jlp.Int8Rows()))
        assert own.how == "native" and own.why.endswith("exact sums of groups")
        assert integers.why == "INT8 tensor cores, exact sums, by cuBLASLt"

    def test_a_gpu_without_kernels_runs_what_is_portable(self, monkeypatch):
        library = dataclasses.replace(native.library(), platforms=("cpu",), missing={"cuda": "built without CUDA"})
        monkeypatch.setattr(native, "library", lambda: library)
        monkeypatch.setattr(native, "compute_capability", lambda: 9.0)
        ok, why = jlp.supported(jlp.NVFP4BlockScaling(), platform="gpu")
        assert ok and "the reference in pure JAX, compiled by XLA, because built without CUDA" in why
        assert "NVFP4 1x16 by NVFP4 1x16: XLA's product of operands decoded to bfloat16, because built without" in why
        assert "XLA's product of FP8 codes" in jlp.supported(jlp.Float8CurrentScaling(), platform="gpu").reason


class TestPortable:
    """Where there are no kernels, products are XLA's."""

    @pytest.mark.parametrize(
        ("formats", "platform", "product"),
        [
            ((jlp.NVFP4(), jlp.NVFP4()), "tpu", "XLA's product of operands decoded to bfloat16"),
            ((jlp.Float8Block(), jlp.Float8Block()), "rocm", "XLA's product of operands decoded to bfloat16"),
            ((jlp.Float8Tensor(), jlp.Float8Tensor()), "tpu", "XLA's product of FP8 codes"),
            ((jlp.Float8Tensor(), jlp.Float8Tensor()), "METAL", "XLA's product of operands decoded to bfloat16"),
            ((jlp.Float8Block(power_of_two=False),) * 2, "tpu", "XLA's product of float32 at the highest precision"),
            ((jlp.Int4(),), "tpu", "XLA's product with the weight decoded to bfloat16"),
            ((jlp.Int4(scale_dtype="float16"),), "rocm", "XLA's product with the weight decoded to float16"),
        ],
    )
    def test_the_product_of_each_pair(self, formats, platform, product):
        way = support.runs("scaled_matmul", platform, formats)
        assert way.how == "portable" and way.why.startswith(f"{product}, because this build of jaxlowprec has no")

    def test_quantisers_of_tpus(self):
        kernel = "a Pallas kernel on one device and in shard_map, else the reference"
        for fmt in (jlp.MXFP8(), jlp.Int4()):
            assert support.runs("quantize", "tpu", (fmt,)).why.startswith(kernel)
        for fmt in (jlp.Int4(scale_dtype="float16"), jlp.NVFP4(scale_rule="four_over_six"), jlp.Int8Rows()):
            assert support.runs("quantize", "tpu", (fmt,)).why.startswith("the reference in pure JAX")
        assert support.runs("quantize", "rocm", (jlp.MXFP8(),)).why.startswith("the reference in pure JAX")

    @pytest.mark.parametrize("op", ["dequantize", "hadamard_transform", "norm", "statistics"])
    def test_other_ops(self, op):
        way = support.runs(op, "tpu", (jlp.NVFP4(),))
        assert way.how == "portable" and way.why.startswith("the reference in pure JAX, compiled by XLA, because")

    def test_groups(self):
        pair = (jlp.MXFP8(), jlp.MXFP8())
        assert "decoded to bfloat16, by ragged_dot, because" in support.runs("grouped_matmul", "tpu", pair).why
        assert "a chunk of each group's rows at a time" in support.runs("grouped_matmul", "rocm", pair).why
        integers = support.runs("grouped_matmul", "tpu", (jlp.Int8Rows(), jlp.Int8Rows("bfloat16"))).why
        assert "exact sums in int32, a chunk of each group's rows at a time" in integers

    def test_an_implementation_that_the_environment_chooses(self, monkeypatch):
        for name in ("portable", "reference"):
            monkeypatch.setenv("JAXLOWPREC_IMPLEMENTATION", name)
            way = support.runs("quantize", "cpu", (jlp.NVFP4(),))
            assert way.how == name and f"JAXLOWPREC_IMPLEMENTATION is {name}" in way.why


class TestInfo:
    def test_info_says_the_same_of_each_recipe(self, capsys):
        assert main(["info", "--json"]) == 0
        found = {r["recipe"]: r["platforms"]["cpu"] for r in json.loads(capsys.readouterr().out)["recipes"]}
        for recipe in (jlp.NVFP4BlockScaling(), jlp.Float8CurrentScaling(), jlp.Int4QAT()):
            assert found[type(recipe).__name__] == jlp.supported(recipe, platform="cpu")._asdict()
        assert main(["info"]) == 0
        text = capsys.readouterr().out
        assert all(f"{recipe} runs. {answer['reason']}" in text for recipe, answer in found.items())

    def test_info_asks_the_same_function(self, capsys, monkeypatch):
        monkeypatch.setattr(support, "runs", lambda *_: support.Runs("reference", "said by the test"))
        assert main(["info", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        said = [how for o in found["operations"] for how in o["platforms"].values()]
        assert said and all(how == {"runs": "reference", "why": "said by the test"} for how in said)
        assert all("said by the test" in r["platforms"]["cpu"]["reason"] for r in found["recipes"])
