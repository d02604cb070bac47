"""Conversion of whole checkpoints: every tensor in its format, nothing silently lost or left."""

import ctypes
import pathlib
import threading
import weakref

import ml_dtypes
import numpy as np
import pytest

from jaxlowprec.checkpoints import schemes
from jaxlowprec.checkpoints.conversion.convert import ConvertOptions, convert, dequantize, scheme_for
from jaxlowprec.checkpoints.conversion.plan import LeftModule
from jaxlowprec.checkpoints.conversion.quantizing import amax
from jaxlowprec.checkpoints.conversion.rules import matching
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.dtypes import BITS, QUANTISED, file_dtype
from jaxlowprec.checkpoints.files.folder import CheckpointFolder
from tests.checkpoints.small_models import (
    CONFIG,
    contents,
    llama,
    read_config,
    read_index,
    read_tensors,
    same,
    write_checkpoint,
)

SCHEMES = {
    "w4a16": schemes.by_name("w4a16", group_size=32),
    "w4a16_asym": schemes.by_name("w4a16_asym", group_size=64),
    "nvfp4": schemes.by_name("nvfp4"),
    "mxfp4": schemes.by_name("mxfp4"),
    "mxfp8": schemes.by_name("mxfp8"),
    "fp8_block": schemes.by_name("fp8_block"),
    "deepseek_fp8": schemes.by_name("deepseek_fp8"),
    "nvfp4_w4a4": schemes.by_name("nvfp4_w4a4"),
    "modelopt_nvfp4": schemes.by_name("modelopt_nvfp4"),
    "miles_mxfp8": schemes.by_name("miles_mxfp8"),
    "gptq": schemes.by_name("gptq", group_size=32),
    "awq": schemes.by_name("awq", group_size=32),
    "fp8_channel": schemes.by_name("fp8_channel"),
    "fp8_tensor": schemes.by_name("fp8_tensor"),
    "int8_channel": schemes.by_name("int8_channel"),
    "autofp8": schemes.by_name("autofp8", activations="static"),
    "modelopt_fp8": schemes.by_name("modelopt_fp8"),
    "w4a16 of rows": schemes.by_name("w4a16", group_size=-1),
    "gptq of rows": schemes.by_name("gptq", group_size=-1),
    "awq of rows": schemes.by_name("awq", group_size=-1),
}
MXFP4 = SCHEMES["mxfp4"]
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@pytest.fixture
def source(tmp_path):
    return write_checkpoint(tmp_path / "source", llama())


def projections(tensors):
    return [n.removesuffix(".weight") for n in tensors if n.endswith("_proj.weight")]


def expected_amax(module, tensors):
    """The largest magnitude of the projections that are fused with a module's."""
    parent, _, last = module.rpartition(".")
    siblings = next((group for group in FUSED if last in group), (last,))
    return max(float(np.abs(tensors[f"{parent}.{s}.weight"].astype(np.float32)).max()) for s in siblings)


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_and_back(source, tmp_path, name):
    scheme, tensors = SCHEMES[name], read_tensors(source)
    report = convert(source, tmp_path / "low", scheme, options=ConvertOptions(verify=True))
    low = read_tensors(tmp_path / "low")
    modules = projections(tensors)
    assert sorted(report.changed) == sorted(modules) and report.verified == len(low)
    plain = [n for n in tensors if n.removesuffix(".weight") not in modules]
    expected = {n: tensors[n] for n in plain}
    decoded = {n: tensors[n] for n in plain}
    for module in modules:
        shared = expected_amax(module, tensors) if scheme.shares_global_scale else None
        made = scheme.compress(tensors[f"{module}.weight"], amax=shared)
        expected |= {f"{module}.{suffix}": array for suffix, array in made.items()}
        decoded[f"{module}.weight"] = scheme.decompress(made)
    assert set(low) == set(expected) and all(same(low[n], expected[n]) for n in low)
    assert read_index(tmp_path / "low")["metadata"] == {"total_size": sum(a.nbytes for a in low.values())}
    config = read_config(tmp_path / "low")
    assert schemes.from_config(config).name == scheme.name
    assert {**config, "quantization_config": None} == {**CONFIG, "quantization_config": None}

    back = dequantize(tmp_path / "low", tmp_path / "back", options=ConvertOptions(verify=True))
    high = read_tensors(tmp_path / "back")
    assert sorted(back.changed) == sorted(modules)
    assert set(high) == set(decoded) and all(same(high[n], decoded[n]) for n in high)
    assert read_config(tmp_path / "back") == CONFIG
    assert read_index(tmp_path / "back")["metadata"] == {"total_size": sum(a.nbytes for a in high.values())}


@pytest.mark.parametrize("folder", ["low", "back"])
def test_other_files_come_along_and_no_trace_of_the_work_is_left(source, tmp_path, folder):
    convert(source, tmp_path / "low", MXFP4)
    dequantize(tmp_path / "low", tmp_path / "back")
    assert set(contents(tmp_path / folder)) == set(contents(source))
    assert contents(tmp_path / folder)["extra/notes.txt"] == b"kept"


def test_one_file_stays_one_file(tmp_path):
    source = write_checkpoint(tmp_path / "source", llama(1), shards=1)
    convert(source, tmp_path / "low", MXFP4)
    assert set(contents(tmp_path / "low")) == set(contents(source))


def test_an_engine_leaves_alone_what_was_left_alone(source, tmp_path):
    report = convert(source, tmp_path / "low", MXFP4, ignore=["model.layers.1.self_attn.o_proj"])
    ignore = read_config(tmp_path / "low")["quantization_config"]["ignore"]
    assert ignore == report.ignore
    modules = [n.removesuffix(".weight") for n, a in read_tensors(source).items() if a.ndim == 2]
    assert {m for m in modules if matching(m, ignore)} == {entry.module for entry in report.left}
    assert set(modules) == {*report.changed, *(entry.module for entry in report.left)}
    assert (
        "model.layers.1.self_attn.o_proj" in ignore
        and f"{'model.layers.1.self_attn.o_proj'}.weight" in read_tensors(tmp_path / "low")
    )


def test_a_format_without_expressions_names_modules(source, tmp_path):
    report = convert(source, tmp_path / "low", SCHEMES["modelopt_nvfp4"])
    assert report.ignore == ["lm_head", "model.embed_tokens"]


def test_a_tied_head_is_ignored_though_it_has_no_tensor(tmp_path):
    tensors = llama(1)
    del tensors["lm_head.weight"]
    source = write_checkpoint(tmp_path / "source", tensors)
    assert matching("lm_head", convert(source, tmp_path / "low", MXFP4).ignore)


def test_included_although_the_defaults_leave_it_alone(source, tmp_path):
    report = convert(source, tmp_path / "low", MXFP4, include=["lm_head"])
    assert "lm_head" in report.changed and "lm_head.weight_packed" in read_tensors(tmp_path / "low")
    assert not matching("lm_head", report.ignore)


def test_without_defaults_all_that_readers_decode_is_quantised(source, tmp_path):
    report = convert(source, tmp_path / "low", MXFP4, defaults=())
    assert "lm_head" in report.changed and [entry.module for entry in report.left] == ["model.embed_tokens"]


def test_a_rule_that_matches_nothing_is_said(source, tmp_path):
    report = convert(source, tmp_path / "low", MXFP4, ignore=["re:.*vision"], include=["lm_heat"])
    assert [w for w in report.warnings if "matches no weight" in w] == [
        "rule 're:.*vision' matches no weight",
        "rule 'lm_heat' matches no weight",
    ]


@pytest.mark.parametrize(
    "rules", [["re:.*q_proj"], ["re:.*up_proj"], ["model.layers.0.self_attn.k_proj", "re:.*self_attn.v_proj"]]
)
def test_fused_projections_are_not_split(source, tmp_path, rules):
    with pytest.raises(CheckpointError, match="engines hold them as one weight"):
        convert(source, tmp_path / "low", MXFP4, ignore=rules)
    assert not (tmp_path / "low").exists()


def odd_model():
    tensors = llama(1)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weight = tensors[f"model.layers.0.{name}.weight"]
        tensors[f"model.layers.0.{name}.weight"] = np.ascontiguousarray(weight[:, :-16])
    return tensors


def test_columns_that_split_a_group_are_refused_and_listed(tmp_path):
    source = write_checkpoint(tmp_path / "source", odd_model())
    with pytest.raises(
        CheckpointError, match=r"cannot hold 2 weights .*mlp.down_proj.*240.*o_proj.*112.*--leave-unfit"
    ):
        convert(source, tmp_path / "low", MXFP4)
    report = convert(source, tmp_path / "low", MXFP4, leave_unfit=True)
    left = [entry.module for entry in report.left if "not a multiple" in entry.reason]
    assert left == ["model.layers.0.mlp.down_proj", "model.layers.0.self_attn.o_proj"]
    assert set(left) < set(read_config(tmp_path / "low")["quantization_config"]["ignore"])
    assert {f"{m}.weight" for m in left} < set(read_tensors(tmp_path / "low"))


def test_arrays_of_all_experts_are_left_alone_listed_and_ignored(tmp_path):
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = llama(1) | {name: np.ones((4, 64, 32), ml_dtypes.bfloat16)}
    report = convert(write_checkpoint(tmp_path / "source", tensors), tmp_path / "low", MXFP4)
    assert LeftModule(name, "all experts' weights in one array") in report.left
    assert any("1 arrays that hold all experts" in warning for warning in report.warnings)
    assert same(read_tensors(tmp_path / "low")[name], tensors[name])
    for asked in ("model.layers.0.mlp.experts", "model.layers.0.mlp.experts.0.gate_proj", name):  # as engines ask
        assert matching(asked, report.ignore)


def test_filters_and_loose_matrices_are_left_and_listed(tmp_path):
    tensors = llama(1) | {
        "model.layers.0.filter.weight": np.ones((8, 1, 32), ml_dtypes.bfloat16),
        "model.layers.0.table": np.ones((8, 32), ml_dtypes.bfloat16),
        "model.layers.0.counts.weight": np.ones((8, 32), np.int32),
    }
    report = convert(write_checkpoint(tmp_path / "source", tensors), tmp_path / "low", MXFP4)
    reasons = {entry.module: entry.reason for entry in report.left}
    assert reasons["model.layers.0.filter"] == "3 dimensions" and reasons["model.layers.0.counts"] == "dtype I32"
    assert reasons["model.layers.0.table"] == "not the weight of a module"


def test_fused_projections_in_different_files_share_their_scale(source, tmp_path):
    tensors = read_tensors(source)
    convert(source, tmp_path / "low", SCHEMES["nvfp4"])
    low, at = read_tensors(tmp_path / "low"), "model.layers.1.self_attn"
    shard_of = read_index(source)["weight_map"]
    assert len({shard_of[f"{at}.{p}_proj.weight"] for p in "qkv"}) > 1
    scales = {float(low[f"{at}.{p}_proj.weight_global_scale"][0]) for p in "qkv"}
    assert scales == {float(np.float32(2688) / np.float32(expected_amax(f"{at}.q_proj", tensors)))}


@pytest.mark.parametrize("entry", [{"quant_method": "fp8"}, {"quant_algo": "NVFP4"}])
@pytest.mark.parametrize("place", [None, "text_config"])
def test_a_quantised_source_is_refused(tmp_path, entry, place):
    config = {**CONFIG, **({place: {"quantization_config": entry}} if place else {"quantization_config": entry})}
    source = write_checkpoint(tmp_path / "source", llama(1), config=config)
    with pytest.raises(CheckpointError, match="is quantised already: its config says.*dequantize"):
        convert(source, tmp_path / "low", MXFP4)


@pytest.mark.parametrize("entry", ["fp8", ["fp8"], 8, True])
@pytest.mark.parametrize("place", [None, "text_config"])
def test_a_quantization_config_of_another_type_is_not_overlooked(tmp_path, entry, place):
    said = {"quantization_config": entry}
    config = {**CONFIG, **({place: said} if place else said)}
    source = write_checkpoint(tmp_path / "source", llama(1), config=config)
    with pytest.raises(CheckpointError, match="quantization_config is .*; needs an object"):
        convert(source, tmp_path / "low", MXFP4)


@pytest.mark.parametrize(
    "name", ["x.weight_packed", "x.weight_scale_inv", "x.qweight", "mlp.experts.gate_up_proj_blocks"]
)
def test_quantised_tensors_are_refused_whatever_the_config_says(tmp_path, name):
    source = write_checkpoint(tmp_path / "source", llama(1) | {name: np.zeros((2, 2), np.uint8)})
    with pytest.raises(CheckpointError, match="is quantised already: it holds"):
        convert(source, tmp_path / "low", MXFP4)
    tensors = llama(1) | {"x.weight": np.zeros((2, 32), ml_dtypes.float8_e4m3fn)}
    with pytest.raises(CheckpointError, match="it holds 'x.weight' of F8_E4M3"):
        convert(write_checkpoint(tmp_path / "eight", tensors), tmp_path / "low", MXFP4)


def test_exactly_dtypes_of_eight_bits_or_less_are_quantised():
    eight = {"F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
    assert {"F4", "F6_E2M3", "F6_E3M2", *eight} == QUANTISED and set(BITS) > QUANTISED


@pytest.mark.parametrize("dtype", [np.float64, np.complex64, np.int64, np.bool_, np.uint16])
def test_tensors_of_other_dtypes_are_copied_and_listed(tmp_path, dtype):
    tensors = llama(1) | {"x.weight": np.ones((2, 32), dtype), "model.inv_freq": np.ones(4, dtype)}
    report = convert(
        write_checkpoint(tmp_path / "source", tensors), tmp_path / "low", MXFP4, options=ConvertOptions(verify=True)
    )
    assert LeftModule("x", f"dtype {file_dtype(dtype)}") in report.left
    low = read_tensors(tmp_path / "low")
    assert all(same(low[name], tensors[name]) for name in ("x.weight", "model.inv_freq"))


def test_a_plain_checkpoint_is_not_dequantised(source, tmp_path):
    with pytest.raises(CheckpointError, match="no quantization_config"):
        dequantize(source, tmp_path / "high")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_weights_that_are_not_finite_are_refused(tmp_path, value, dtype):
    tensors = llama(1, dtype)
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = value
    source = write_checkpoint(tmp_path / "source", tensors)
    with pytest.raises(CheckpointError, match="'model.layers.0.mlp.up_proj.weight' holds NaN or infinity"):
        convert(source, tmp_path / "low", MXFP4)
    assert not [p for p in contents(tmp_path / "low") if "writing" in p or p == "config.json"]


def test_weights_beyond_the_deployment_dtype_are_refused(tmp_path):
    tensors = llama(1, np.float32)
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = 3.4e38  # infinity in bfloat16
    source = write_checkpoint(tmp_path / "source", tensors)
    with pytest.raises(CheckpointError, match="module 'model.layers.0.mlp.up_proj': .*not finite"):
        convert(source, tmp_path / "low", SCHEMES["w4a16"])


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("values", [[0.0], [-0.0], [1, -3.5, 2], [-1, -2], [1e-7, 0], [np.nan, 9], [-np.inf, 1]])
def test_the_largest_magnitude(dtype, values):
    array = np.array([values], np.float32).astype(dtype)
    np.testing.assert_array_equal(amax(array), np.float64(np.abs(array).max()))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_sources_of_other_dtypes(tmp_path, dtype):
    tensors = llama(1, np.dtype(dtype))
    source = write_checkpoint(tmp_path / "source", tensors, config={**CONFIG, "dtype": dtype})
    scheme = scheme_for(source, "w4a16", group_size=32)
    assert scheme.scale_dtype == {"float16": "float16", "float32": "bfloat16"}[dtype]
    convert(source, tmp_path / "low", scheme, options=ConvertOptions(verify=True))
    dequantize(tmp_path / "low", tmp_path / "back", dtype=dtype)
    high = read_tensors(tmp_path / "back")
    for module in projections(tensors):
        made = scheme.compress(tensors[f"{module}.weight"])
        assert same(high[f"{module}.weight"], scheme.decompress(made, dtype))


def test_the_config_of_a_nested_text_model_says_it_too(tmp_path):
    config = {"model_type": "vl", "text_config": {"hidden_size": 128}, "vision_config": {"depth": 2}}
    source = write_checkpoint(tmp_path / "source", llama(1), config=config)
    convert(source, tmp_path / "low", MXFP4)
    found = read_config(tmp_path / "low")
    assert found["quantization_config"] == found["text_config"]["quantization_config"]
    assert found["vision_config"] == {"depth": 2}
    dequantize(tmp_path / "low", tmp_path / "back")
    assert read_config(tmp_path / "back") == config


def test_a_dry_run_says_the_same_and_writes_nothing(source, tmp_path):
    before = contents(tmp_path)
    planned = convert(source, tmp_path / "low", MXFP4, options=ConvertOptions(dry_run=True))
    assert contents(tmp_path) == before and not (tmp_path / "low").exists()
    done = convert(source, tmp_path / "low", MXFP4)
    for field in ("changed", "left", "ignore", "warnings", "source_bytes", "output_bytes", "copied"):
        assert getattr(planned, field) == getattr(done, field)
    assert done.output_bytes == sum(a.nbytes for a in read_tensors(tmp_path / "low").values())


@pytest.mark.parametrize("workers", [1, 5])
def test_bytes_do_not_depend_on_the_workers(source, tmp_path, workers):
    convert(source, tmp_path / "two", SCHEMES["nvfp4"])
    convert(source, tmp_path / "other", SCHEMES["nvfp4"], options=ConvertOptions(workers=workers))
    assert contents(tmp_path / "two") == contents(tmp_path / "other")


@pytest.mark.parametrize("suffix", ["weight_packed", "weight_scale", "bias"])
def test_verification_sees_one_flipped_bit(source, tmp_path, monkeypatch, suffix):
    from jaxlowprec.checkpoints.conversion import convert as module

    def harmed(plan, opened, destination, *arguments):
        written = write_shards(plan, opened, destination, *arguments)
        with CheckpointFolder(source) as _:
            name = f"model.layers.0.self_attn.q_proj.{suffix}"
            path = destination / plan.shard_of[name]
        from jaxlowprec.checkpoints.files.safetensors_file import SafetensorsFile

        with SafetensorsFile(path) as file:
            at = file.header.tensors[name].offset
        damaged = bytearray(path.read_bytes())
        damaged[at] ^= 1
        path.write_bytes(damaged)
        return written

    write_shards = module.write_shards
    monkeypatch.setattr(module, "write_shards", harmed)
    with pytest.raises(CheckpointError, match=f"q_proj.{suffix}' differs"):
        convert(source, tmp_path / "low", MXFP4, options=ConvertOptions(verify=True))


def test_a_destination_of_its_own(source, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(source)
    for destination, message in [
        (tmp_path / "full", "is not empty"),
        (tmp_path / "file", "is not a folder; choose another path"),
        (source, "is, holds, or lies in the source"),
        (source / "low", "is, holds, or lies in the source"),
        (tmp_path / "link", "is, holds, or lies in the source"),
        (tmp_path, "is, holds, or lies in the source"),
    ]:
        before = contents(tmp_path)
        for options in (ConvertOptions(), ConvertOptions(dry_run=True)):
            with pytest.raises(CheckpointError, match=message):
                convert(source, destination, MXFP4, options=options)
        assert contents(tmp_path) == before


def test_the_same_weights_in_other_files_are_left_out_and_named(source, tmp_path):
    for name in ("pytorch_model.bin", "consolidated.00.pth", "consolidated.safetensors", "x.gguf"):
        (source / name).write_bytes(b"weights")
    (source / ".git").mkdir()
    (source / ".git" / "HEAD").write_text("x")
    (source / "extra" / "part.safetensors").write_bytes(b"of something else")
    (source / "linked.txt").symlink_to(source / "tokenizer.json")
    report = convert(source, tmp_path / "low", MXFP4)
    assert report.left_out == [".git", "consolidated.00.pth", "consolidated.safetensors", "pytorch_model.bin", "x.gguf"]
    made = contents(tmp_path / "low")
    assert made["extra/part.safetensors"] == b"of something else"
    assert made["linked.txt"] == b"{}" and not (tmp_path / "low" / "linked.txt").is_symlink()
    assert not set(report.left_out) & set(made)


def test_nothing_to_quantise_is_an_error(source, tmp_path):
    with pytest.raises(CheckpointError, match="nothing to quantise"):
        convert(source, tmp_path / "low", MXFP4, ignore=["re:.*"])


def test_a_full_disk_is_said_before_it_is_full(source, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10}))
    with pytest.raises(CheckpointError, match="bytes, only 10 are free"):
        convert(source, tmp_path / "low", MXFP4)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_as_many_tensors_are_in_memory_as_there_are_workers(tmp_path, monkeypatch, workers):
    source = write_checkpoint(tmp_path / "source", llama(6), shards=1)  # one file, far more tensors than workers
    live, most, lock = [0], [0], threading.Lock()

    def gone(nbytes):
        with lock:
            live[0] -= nbytes

    class Counted(type(MXFP4)):
        def compress(self, weight, *, amax=None):
            assert not weight.flags.owndata and not weight.flags.writeable  # a view of the file
            made = super().compress(weight, amax=amax)
            with lock:
                live[0] += sum(a.nbytes for a in made.values())
                most[0] = max(most[0], live[0])
            for array in made.values():
                weakref.finalize(array, gone, array.nbytes)
            return made

    report = convert(source, tmp_path / "low", Counted(), options=ConvertOptions(workers=workers))
    largest = 256 * 128 // 2 + 256 * 128 // 32
    assert report.output_bytes > 12 * largest
    assert 0 < most[0] <= workers * largest


@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="no /proc to read the memory from")
def test_memory_does_not_grow_with_the_file(tmp_path):
    columns, rows, count = 4096, 1024, 24  # 8 MiB a tensor, 192 MiB in one file
    weight = np.ones((rows, columns), ml_dtypes.bfloat16)
    tensors = {f"model.layers.{i}.mlp.down_proj.weight": weight for i in range(count)}
    source = write_checkpoint(tmp_path / "source", tensors, shards=1)
    held, libc = [], ctypes.CDLL(None)

    def progress(*_):
        getattr(libc, "malloc_trim", lambda _: None)(0)  # what is in use, without what the allocator keeps
        status = pathlib.Path("/proc/self/status").read_text()
        held.append(int(status.split("RssAnon:")[1].split()[0]) * 1024)

    # One worker: what several hold at once varies from run to run. The least of each half is without what is in work.
    convert(source, tmp_path / "low", MXFP4, options=ConvertOptions(workers=1, progress=progress))
    assert len(held) > count
    middle = len(held) // 2
    growth = min(held[middle:]) - min(held[4:middle])  # once it is compiled; kept results would add 17 MiB
    assert growth < weight.nbytes, growth


@pytest.mark.parametrize("given", [{"scheme": "nvfp4"}, {"scheme": None}, {"overrides": {"re:.*": "nvfp4"}}])
def test_a_name_is_no_scheme(tmp_path, given):
    with pytest.raises(TypeError, match=r"convert: scheme=('nvfp4'|None); needs a scheme, such as .*\)$"):
        convert(tmp_path, tmp_path / "new", **{"scheme": schemes.by_name("w4a16"), **given})
