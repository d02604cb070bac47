"""The scheme of a name, of a checkpoint's configuration, or of the tensors of one module."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from jaxlowprec.checkpoints.errors import brief
from jaxlowprec.checkpoints.schemes.base import Scheme
from jaxlowprec.checkpoints.schemes.eight_bit_rows import Float8Channel, Int8Channel
from jaxlowprec.checkpoints.schemes.eight_bit_tensors import (
    AutoFloat8,
    DeepSeekFloat8,
    Float8PerTensor,
    Float8Tiles,
    ModelOptFloat8,
)
from jaxlowprec.checkpoints.schemes.gptq import AWQ, GPTQ
from jaxlowprec.checkpoints.schemes.int4 import PackedInt4, PackedInt4Asymmetric
from jaxlowprec.checkpoints.schemes.mixed import ConfigGroup, Mixed, check_target
from jaxlowprec.checkpoints.schemes.mx import GPTOSSMXFP4, MilesMXFP8, PackedMXFP4, QuantizedMXFP8
from jaxlowprec.checkpoints.schemes.nvfp4 import ModelOptNVFP4, PackedNVFP4, PackedNVFP4W4A4
from jaxlowprec.checkpoints.schemes.w4a8 import W4A8, MXFP4Float8, W4AFloat8

_CLASSES: tuple[type[Scheme], ...] = (
    PackedInt4,
    PackedInt4Asymmetric,
    PackedNVFP4,
    PackedNVFP4W4A4,
    PackedMXFP4,
    QuantizedMXFP8,
    Float8Tiles,
    Float8Channel,
    Float8PerTensor,
    Int8Channel,
    W4A8,
    W4AFloat8,
    MXFP4Float8,
    DeepSeekFloat8,
    AutoFloat8,
    ModelOptNVFP4,
    ModelOptFloat8,
    MilesMXFP8,
    GPTOSSMXFP4,
    GPTQ,
    AWQ,
)
_SCHEMES = {scheme.name: scheme for scheme in _CLASSES}

NAMES = tuple(_SCHEMES)
"""The names of all schemes."""

_WHO = "schemes.from_config"
_LARGEST_GROUP = 1 << 30
_MODELOPT = {"NVFP4": "modelopt_nvfp4", "FP8": "modelopt_fp8"}


def by_name(name: str, *, group_size: int | None = None, **options: Any) -> Scheme:
    """The scheme of a name.

    Arguments:
        name: one of `NAMES`.
        group_size: elements along K that share a scale, for the INT4 schemes, which leave it open; -1: a whole row.
            None: the scheme's default.
        options: other fields of the scheme's class.

    Raises:
        ValueError: an unknown name or option, or a group size that the format does not have.
    """
    if name not in _SCHEMES:
        raise ValueError(f"schemes.by_name: no scheme {name!r}; there are {', '.join(NAMES)}")
    scheme = _SCHEMES[name]
    fields = [field.name for field in dataclasses.fields(scheme)]  # type: ignore[arg-type]
    if group_size is not None and "group_size" in fields:
        options["group_size"] = group_size
    if unknown := sorted(set(options) - set(fields)):
        known = ", ".join(fields) or "none"
        raise ValueError(f"schemes.by_name: {name} has no option {', '.join(unknown)}; its options: {known}")
    made = scheme(**options)
    if getattr(made, "group_size", None) == -1 or group_size is None:
        return made
    if not made.has_format or made.format.scaling == "tensor":
        raise ValueError(f"schemes.by_name: group_size={group_size}; {name} has no groups: leave it out")
    if group_size != made.format.length:
        raise ValueError(f"schemes.by_name: group_size={group_size}; {name} has groups of {made.format.length}")
    return made


def from_config(config: Mapping[str, Any]) -> Scheme:
    """The scheme that a configuration names; a `Mixed` where groups of modules are in different formats.

    Arguments:
        config: a config.json (a nested text model may hold the entry), only its `quantization_config`, or ModelOpt's
            hf_quant_config.json.

    Raises:
        ValueError: no scheme, one that is not supported, or targets that are not valid.
    """
    entry = _entry(_object(config, "the configuration"))
    method = entry.get("quant_method")
    readers = {
        "compressed-tensors": _compressed_tensors,
        "fp8": _fp8,
        "modelopt": _modelopt,
        "modelopt_fp4": _modelopt,
        "modelopt_mixed": _modelopt,
        "mxfp8": _mxfp8,
        "mxfp4": _mxfp4,
        "gptq": _gptq,
        "awq": _awq,
    }
    if not isinstance(method, str) or method not in readers:
        raise ValueError(f"{_WHO}: quant_method is {brief(method)}; supported are {', '.join(readers)}")
    return readers[method](entry)


def detect(tensors: Mapping[str, Any]) -> Scheme | None:
    """The scheme of one module, from its tensors.

    Arguments:
        tensors: by the last part of their names: arrays, other objects with a `dtype` and a `shape`, or pairs of a
            dtype's name and a shape. Tensors that belong to no scheme, such as "bias", are ignored.

    Returns:
        None for a module that is not quantised in a known format.

    Raises:
        ValueError: GPTQ, because its tensors do not show which version of zero points they hold.
    """
    specs = {name: _spec(tensor) for name, tensor in tensors.items()}
    dtypes = {name: dtype for name, (dtype, _) in specs.items()}
    scale = "weight_scale_inv" if "weight_scale_inv" in specs else "weight_scale"
    match dtypes.get("weight_packed"), dtypes.get("weight"), dtypes.get(scale):
        case "int32", None, "bfloat16" | "float16":
            return _packed_int4(tensors, specs)
        case "uint8", None, "float8_e4m3fn":
            return by_name("nvfp4_w4a4" if "input_global_scale" in specs else "nvfp4")
        case "uint8", None, "uint8" | "float8_e8m0fnu":
            return by_name("mxfp4")
        case None, "uint8", "float8_e4m3fn" if "weight_scale_2" in specs:
            return by_name("modelopt_nvfp4")
        case None, "float8_e4m3fn", "float32" | "bfloat16" | "float8_e8m0fnu" as dtype if _tiles(
            specs["weight"][1], specs[scale][1]
        ):
            name = "fp8_block" if scale == "weight_scale" else "deepseek_fp8"
            return by_name(name, scale_dtype=dtype, power_of_two=dtype == "float8_e8m0fnu")
        case None, "float8_e4m3fn", "uint8" | "float8_e8m0fnu":
            return by_name("mxfp8" if scale == "weight_scale" else "miles_mxfp8")
        case None, "int8" | "float8_e4m3fn" as codes, "float32" | "bfloat16" | "float16" if scale == "weight_scale":
            return _of_rows_or_tensor(codes, specs)
    return _words_along_columns(specs) if {"qweight", "qzeros", "scales"} <= set(specs) else None


def _spec(tensor: Any) -> tuple[str, tuple[int, ...]]:
    dtype, shape = tensor if isinstance(tensor, tuple) else (tensor.dtype, tensor.shape)
    return str(getattr(dtype, "name", dtype)), tuple(shape)


def _of_rows_or_tensor(codes: str, specs: Mapping[str, Any]) -> Scheme | None:
    """The scheme of 8-bit codes with one scale per row or tensor; None for another shape of scales."""
    dtype, shape = specs["weight_scale"]
    activations = "static" if "input_scale" in specs else "dynamic"
    if shape == (*specs["weight"][1][:1], 1) and len(shape) == 2:
        return by_name("fp8_channel" if codes == "float8_e4m3fn" else "int8_channel", activations=activations)
    (_, columns), groups = specs["weight"][1], shape[-1] if len(shape) == 2 else 0
    if codes == "int8" and groups and columns % groups == 0 and dtype != "float32":
        return by_name("w4a8", group_size=columns // groups, scale_dtype=dtype)
    if codes != "float8_e4m3fn" or shape not in ((), (1,)):
        return None
    # AutoFP8's files and ModelOpt's differ only in their configurations
    return by_name("fp8_tensor" if shape else "autofp8", activations=activations, scale_dtype=dtype)


def _tiles(weight: tuple[int, ...], scale: tuple[int, ...]) -> bool:
    return len(weight) == 2 and scale == (-(-weight[0] // 128), -(-weight[1] // 128))


def _packed_int4(tensors: Mapping[str, Any], specs: Mapping[str, Any]) -> Scheme:
    shape = tensors.get("weight_shape")
    known = shape is not None and not isinstance(shape, tuple) and hasattr(shape, "__array__")
    columns = int(shape[1]) if known else 8 * specs["weight_packed"][1][1]  # type: ignore[index]
    dtype, (_, groups) = specs["weight_scale"]
    if not groups or columns % groups:
        raise ValueError(f"schemes.detect: weight_scale has {groups} groups for {columns} columns; needs whole groups")
    name = "w4a16_asym" if "weight_zero_point" in specs else "w4a16"
    return by_name(name, group_size=columns // groups, scale_dtype=dtype)


def _words_along_columns(specs: Mapping[str, Any]) -> Scheme:
    (rows, columns), (dtype, (groups, n)) = specs["qweight"][1], specs["scales"]
    if columns == n:
        raise ValueError("schemes.detect: GPTQ's version of zero points stands in its configuration; use from_config")
    return by_name("awq", group_size=rows // groups, scale_dtype=dtype)


def _entry(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for holder in (config, config.get("text_config")):
        if isinstance(holder, Mapping) and "quantization_config" in holder:
            return _object(holder["quantization_config"], "quantization_config")
    if "quantization" in config:
        return {"quant_method": "modelopt", **_object(config["quantization"], "quantization")}
    if "quant_method" in config:
        return config
    raise ValueError(f"{_WHO}: the configuration has no quantization_config")


def _object(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{_WHO}: {what} is {brief(value)}; needs an object")
    return value


def _need(entry: Mapping[str, Any], key: str, *allowed: Any) -> Any:
    value = entry.get(key)
    if value not in allowed:
        raise ValueError(f"{_WHO}: {key} is {brief(value)}; supported is {' or '.join(repr(a) for a in allowed)}")
    return value


def _flag(entry: Mapping[str, Any], key: str, default: bool) -> bool:
    value = entry.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{_WHO}: {key} is {brief(value)}; needs true or false")
    return value


def _group_size(entry: Mapping[str, Any], default: int | None) -> int | None:
    size = entry.get("group_size", default)
    if size == -1 and type(size) is int:
        return -1
    if size != default and (type(size) is not int or not 0 < size <= _LARGEST_GROUP):
        raise ValueError(f"{_WHO}: group_size is {brief(size)}; needs a whole number of 1 to {_LARGEST_GROUP}, or -1")
    return size


def _compressed_tensors(entry: Mapping[str, Any]) -> Scheme:
    groups = _object(entry.get("config_groups"), "config_groups")
    if not groups:
        raise ValueError(
            f"{_WHO}: config_groups is {{}}: no weights are quantised, so there is nothing to decode; take "
            "quantization_config out of config.json"
        )
    found: dict[str, ConfigGroup] = {}
    for name, value in groups.items():
        group = _object(value, f"group {brief(name)}")
        if len(groups) > 1 and "format" not in group and group.get("weights") is None:
            continue  # activations only, such as those of attention
        scheme = _group(entry, group)
        try:
            found[name] = ConfigGroup(_targets(group), scheme)
        except ValueError as error:
            raise ValueError(f"{_WHO}: group {brief(name)}: {error}") from None
    if not found:
        raise ValueError(f"{_WHO}: no group of config_groups has weights")
    if len({group.scheme for group in found.values()}) == 1:
        return next(iter(found.values())).scheme
    if unnamed := [name for name, group in found.items() if not group.targets]:
        raise ValueError(f"{_WHO}: group {brief(unnamed[0])} has no targets; needs the names of its modules or classes")
    return _mixed(list(found.values()))


def _mixed(groups: list[ConfigGroup]) -> Mixed:
    try:
        return Mixed(tuple(groups))
    except ValueError as error:
        raise ValueError(f"{_WHO}: {error}") from None


def _targets(group: Mapping[str, Any]) -> tuple[str, ...]:
    targets = group.get("targets")
    if targets is None:
        return ()
    if not isinstance(targets, list):
        raise ValueError(f"targets is {brief(targets)}; needs a list of names of modules or classes")
    for target in targets:
        check_target(target)
    return tuple(targets)


def _group(entry: Mapping[str, Any], group: Mapping[str, Any]) -> Scheme:
    format = group.get("format") or entry.get("format")
    weights = _object(group.get("weights") or {}, "weights")
    if format == "mixed-precision":
        format = _implied_format(weights, group.get("input_activations") is not None)
    if format == "pack-quantized":
        _need(weights, "num_bits", 4)
        strategy = _need(weights, "strategy", "group", "channel")
        _need(weights, "actorder", None, False, True, "weight", "static", "group", "dynamic")
        name = "w4a16" if _flag(weights, "symmetric", True) else "w4a16_asym"
        if (inputs := group.get("input_activations")) is not None:
            _need_inputs(inputs, "float", "token")
            name = "w4afp8" if name == "w4a16" else name
        if strategy == "channel":
            _need(weights, "group_size", None, -1)
            return by_name(name, group_size=-1)
        size = _group_size(weights, None)
        if size == -1:
            raise ValueError(f'{_WHO}: group_size is -1, but strategy is "group"; needs strategy "channel"')
        return by_name(name, group_size=size)
    if format in ("int-quantized", "naive-quantized") and weights.get("num_bits") == 4:
        return _four_bits(weights, group.get("input_activations"))
    if format in ("float-quantized", "int-quantized", "naive-quantized"):
        return _eight_bits(format, weights, group.get("input_activations"))
    nvfp4 = "nvfp4_w4a4" if _scaled_locally(group.get("input_activations")) else "nvfp4"
    mxfp4 = "mxfp4_fp8" if _in_eight_bits(group.get("input_activations")) else "mxfp4"
    names = {"nvfp4-pack-quantized": nvfp4, "mxfp4-pack-quantized": mxfp4, "mxfp8-quantized": "mxfp8"}
    if not isinstance(format, str) or format not in names:
        supported = ", ".join(["pack-quantized", "float-quantized", "int-quantized", *names])
        raise ValueError(f"{_WHO}: format is {brief(format)}; supported are {supported}")
    return by_name(names[format])


def _scaled_locally(inputs: Any) -> bool:
    """Whether activations have block scales at run time, relative to a stored scale."""
    return inputs is not None and _object(inputs, "input_activations").get("dynamic") == "local"


def _in_eight_bits(inputs: Any) -> bool:
    """Whether activations are quantised to 8 bits."""
    return inputs is not None and _object(inputs, "input_activations").get("num_bits") == 8


def _need_inputs(inputs: Any, type_: str, strategy: str) -> None:
    """Raises ValueError unless activations are quantised so, to 8 bits at run time."""
    inputs = _object(inputs, "input_activations")
    needed = {"num_bits": 8, "type": type_, "strategy": strategy, "dynamic": True}
    given = {key: inputs.get(key) for key in needed}
    if given != needed:
        raise ValueError(f"{_WHO}: input_activations are {brief(given)}; supported with these weights are {needed}")


def _four_bits(weights: Mapping[str, Any], inputs: Any) -> Scheme:
    """The scheme of codes of 4 bits that are stored in 8."""
    _need(weights, "type", "int")
    if not _flag(weights, "symmetric", True):
        raise ValueError(f"{_WHO}: symmetric is false for weights of 4 bits that are not packed; supported is true")
    if inputs is not None:
        _need_inputs(inputs, "int", "token")
    channel = _need(weights, "strategy", "group", "channel") == "channel"
    return by_name("w4a8", group_size=-1 if channel else _group_size(weights, None))


def _implied_format(weights: Mapping[str, Any], has_inputs: bool) -> str:
    """The format of a group that names none, as compressed-tensors infers it from how weights are quantised."""
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    if weights.get("type") == "int":
        return "int-quantized" if has_inputs else "pack-quantized"
    if bits == 4:
        return "nvfp4-pack-quantized" if strategy == "tensor_group" else "mxfp4-pack-quantized"
    if strategy == "group" and weights.get("scale_dtype") == "torch.uint8":
        return "mxfp8-quantized"
    return "float-quantized"


def _eight_bits(format: str, weights: Mapping[str, Any], inputs: Any) -> Scheme:
    type_ = {"float-quantized": "float", "int-quantized": "int"}.get(format)
    type_ = _need(weights, "type", type_) if type_ else _need(weights, "type", "float", "int")
    _need(weights, "num_bits", 8)
    if not _flag(weights, "symmetric", True):
        raise ValueError(f"{_WHO}: symmetric is false for weights of 8 bits; supported is true")
    strategy = _need(weights, "strategy", *(("block", "channel", "tensor") if type_ == "float" else ("channel",)))
    if strategy == "block":
        _need(weights, "block_structure", [128, 128])
        return by_name("fp8_block")
    dynamic = True if inputs is None else _object(inputs, "input_activations").get("dynamic", False)
    if not isinstance(dynamic, bool):
        raise ValueError(f"{_WHO}: dynamic is {brief(dynamic)}; needs true or false")
    name = {"float": {"channel": "fp8_channel", "tensor": "fp8_tensor"}, "int": {"channel": "int8_channel"}}
    return by_name(name[type_][strategy], activations="dynamic" if dynamic else "static")


def _fp8(entry: Mapping[str, Any]) -> Scheme:
    if entry.get("weight_block_size") is None:
        return by_name("autofp8", activations=_need(entry, "activation_scheme", "dynamic", "static"))
    _need(entry, "weight_block_size", [128, 128])
    return by_name("deepseek_fp8", power_of_two=_need(entry, "scale_fmt", None, "ue8m0") == "ue8m0")


def _modelopt(entry: Mapping[str, Any]) -> Scheme:
    algorithm = _need(entry, "quant_algo", *_MODELOPT, "MIXED_PRECISION")
    if algorithm != "MIXED_PRECISION":
        return by_name(_MODELOPT[algorithm])
    layers = _object(entry.get("quantized_layers"), "quantized_layers")
    groups: dict[str, list[str]] = {}
    for name, value in layers.items():
        layer = _object(value, f"quantized_layers of {brief(name)}")
        scheme = _MODELOPT[_need(layer, "quant_algo", *_MODELOPT)]
        groups.setdefault(scheme, []).extend(_of_layer(name))
    if not groups:
        raise ValueError(f"{_WHO}: quantized_layers is {{}}; needs the quant_algo of each layer")
    if len(groups) == 1:
        return by_name(next(iter(groups)))
    return _mixed([ConfigGroup(tuple(targets), by_name(scheme)) for scheme, targets in groups.items()])


def _of_layer(name: str) -> tuple[str, ...]:
    """Targets for a key of ModelOpt's "quantized_layers": a module, with all modules in it, or with wildcards."""
    if "*" in name or "?" in name:
        return ("re:" + re.escape(name).replace(r"\*", ".*").replace(r"\?", ".") + r"\Z",)
    return (name, rf"re:{re.escape(name)}\.")


def _mxfp8(entry: Mapping[str, Any]) -> Scheme:
    _need(entry, "weight_block_size", [1, 32])
    return by_name("miles_mxfp8")


def _mxfp4(entry: Mapping[str, Any]) -> Scheme:
    return by_name("gpt_oss_mxfp4")


def _gptq(entry: Mapping[str, Any]) -> Scheme:
    _need(entry, "bits", 4)
    version = 2 if _need(entry, "checkpoint_format", None, "gptq", "gptq_v2") == "gptq_v2" else 1
    symmetric = _flag(entry, "sym", True)
    return by_name("gptq", group_size=_group_size(entry, 128), symmetric=symmetric, version=version)


def _awq(entry: Mapping[str, Any]) -> Scheme:
    _need(entry, "bits", 4)
    _need(entry, "version", None, "gemm", "GEMM")
    symmetric = not _flag(entry, "zero_point", True)
    return by_name("awq", group_size=_group_size(entry, 128), symmetric=symmetric)
