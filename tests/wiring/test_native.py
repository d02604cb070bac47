"""A library that is missing, broken, of another version or switched off.

Imports work, the reference gives the same bytes, and a demand for the kernels names the reason.
"""

import functools
import importlib.machinery
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from jaxlowprec.wiring import native
from tests.helpers import assert_same_bytes, digest, golden_input, random_array, run_python

REPOSITORY = pathlib.Path(__file__).parents[2]
REPORT = """
import json, jax
import jaxlowprec as jlp
from jaxlowprec.wiring import native
from tests.wiring.test_native import digests
report = {"digests": digests(), "platforms": native.platforms(), "isa": native.isa(), "isas": native.available_isas()}
report["reason"] = native.why_not("cpu")
try:
    jlp.quantize(jax.numpy.ones((16, 16)), jlp.NVFP4(), implementation="ffi")
except NotImplementedError as error:
    report["error"] = str(error)
print(json.dumps(report))
"""


def digests(implementation=None):
    x = jnp.asarray(golden_input((48, 80), 11)).astype("bfloat16")
    both = jlp.quantize_both(
        x,
        jlp.NVFP4(),
        hadamard_columnwise=True,
        rounding="stochastic",
        key=jax.random.key(2),
        implementation=implementation,
    )
    return [digest(leaf) for leaf in jax.tree.leaves(both)] + [digest(both[1].dequantize())]


def report_of(package=None, **environment):
    """What a fresh interpreter finds; with `package`, a folder that holds a copy of jaxlowprec, in that copy.

    Without `site` there, so that an editable install cannot come before the copy.
    """
    path, options = ([package, *sys.path], ["-S"]) if package else ([REPOSITORY], [])
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(map(str, path)), **environment}
    done = subprocess.run(
        [sys.executable, *options, "-c", REPORT],
        env=environment,
        cwd=package or REPOSITORY,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_only_the_reference(report, reason):
    assert report["digests"] == digests("ffi")
    assert (report["platforms"], report["isa"], report["isas"]) == ([], None, [])
    assert re.match(reason, report["reason"])
    assert report["error"] == f'quantize: implementation="ffi": {report["reason"]}'


@pytest.mark.slow
def test_disabled_by_the_environment():
    assert_only_the_reference(report_of(JAXLOWPREC_DISABLE_NATIVE="1"), "JAXLOWPREC_DISABLE_NATIVE is set$")


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["missing", "corrupt"])
def test_a_package_whose_library_is(broken, tmp_path):
    source, package = pathlib.Path(jlp.__file__).parent, tmp_path / "jaxlowprec"
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("_native*", "__pycache__"))
    if broken == "corrupt":
        (package / f"_native{importlib.machinery.EXTENSION_SUFFIXES[0]}").write_bytes(b"\x7fELF and nothing else")
    assert_only_the_reference(report_of(tmp_path), "the compiled library could not be loaded: ")


@pytest.mark.parametrize("wanted", ["portable", ""])
def test_the_environment_chooses_the_instruction_set(wanted):
    report, isas = report_of(JAXLOWPREC_ISA=wanted, JAXLOWPREC_DISABLE_NATIVE="0"), list(native.available_isas())
    assert report["isa"] == (wanted or isas[0])
    assert report["isas"] == isas
    assert report["digests"] == digests("ffi")
    assert report["reason"] is None
    assert "error" not in report


def test_an_absent_instruction_set_is_an_error():
    code = """if True:
    import jax, jaxlowprec as jlp
    for implementation in (None, "ffi"):
        try:
            jlp.quantize(jax.numpy.ones((16, 16)), jlp.NVFP4(), implementation=implementation)
        except ValueError as error:
            print(error)
    """
    said = run_python("-c", code, JAXLOWPREC_ISA="unheard-of").stdout.splitlines()
    message = rf"JAXLOWPREC_ISA='unheard-of' is not available here; set it to one of .*{native.available_isas()[-1]}"
    assert len(said) == 2 and all(re.match(message, line) for line in said)


def stand_in(monkeypatch, **attributes):
    """Another module where the compiled one is looked for."""
    module = types.ModuleType("jaxlowprec._native")
    vars(module).update(attributes)
    monkeypatch.setattr(jlp, "_native", module, raising=False)
    return module


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"ffi_api_version": (0, 99)}, r"uses XLA FFI 0\.99, this jaxlib has 0\.\d+; reinstall"),
        ({"ffi_api_version": (1, 0)}, r"uses XLA FFI 1\.0, this jaxlib has 0\.\d+; reinstall"),
        ({}, "not usable: AttributeError: .*ffi_api_version"),
        ({"ffi_api_version": (0, 1)}, "not usable: AttributeError: .*cpu_handlers"),
        ({"ffi_api_version": (0, 1), "cpu_handlers": lambda: {"jaxlowprec_test": "no capsule"}}, "not usable: "),
    ],
)
def test_a_library_that_does_not_fit_is_left_alone(monkeypatch, attributes, reason):
    stand_in(monkeypatch, **attributes)
    found = native._load()
    assert (found.module, found.platforms) == (None, ())
    assert re.search(reason, found.reason)


def test_an_older_ffi_of_the_same_major_version_is_taken(monkeypatch):
    module = stand_in(monkeypatch, ffi_api_version=(0, 1), cpu_handlers=dict)
    assert native._load() == native.Library(module, None, ("cpu",))


CUDA = {"ffi_api_version": (0, 1), "cpu_handlers": dict, "cuda_driver_problem": str, "no_cuda": ""}


def with_cuda(monkeypatch, plugin=True, **attributes):
    """What is loaded where the module has CUDA kernels, and JAX perhaps a CUDA plugin; and what is registered."""
    registered = {}

    def register(name, handler, platform):
        if handler is refusing:
            raise RuntimeError("refused")
        registered[name] = handler, platform

    handlers = {"jaxlowprec_amax": "capsule", "jaxlowprec_scaled_matmul": {"prepare": "one", "execute": "another"}}
    stand_in(monkeypatch, **{**CUDA, "cuda_handlers": lambda: handlers, **attributes})
    monkeypatch.setattr(jax.ffi, "register_ffi_target", register)
    monkeypatch.setattr(native.importlib.util, "find_spec", lambda name: "found" if plugin else None)
    return native._load(), registered


def test_cuda_targets_are_registered_where_jax_can_use_them(monkeypatch):
    found, registered = with_cuda(monkeypatch)
    assert (found.platforms, found.missing) == (("cpu", "cuda"), {})
    assert registered["jaxlowprec_amax"] == ("capsule", "CUDA")
    assert registered["jaxlowprec_scaled_matmul"] == ({"prepare": "one", "execute": "another"}, "CUDA")


def test_registering_for_an_absent_platform_does_no_harm():
    run_python(
        "-c",
        """if True:
        import jax
        from jaxlowprec import _native
        handler = _native.cpu_handlers()["jaxlowprec_amax"]
        jax.ffi.register_ffi_target("jaxlowprec_test_one", handler, platform="CUDA")
        jax.ffi.register_ffi_target("jaxlowprec_test_two", {"prepare": handler, "execute": handler}, platform="CUDA")
        assert jax.numpy.ones(2).sum() == 2
        """,
    )


def refusing():
    """A handler that cannot be registered."""


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"cuda_handlers": dict, "no_cuda": "nvcc does not run"},
            r"built without CUDA \(nvcc does not run\); .*make gpu",
        ),
        ({"cuda_handlers": dict}, r"built without CUDA \(no CUDA compiler was found\)"),
        ({"plugin": False}, r'jax has no CUDA plugin here: pip install "jax\[cuda13\]"'),
        ({"cuda_driver_problem": lambda: "the driver is of 1999"}, "the driver is of 1999"),
        (
            {"cuda_handlers": lambda: {"jaxlowprec_amax": refusing}},
            "CUDA kernels are not usable: RuntimeError: refused",
        ),
    ],
)
def test_why_there_is_no_cuda(monkeypatch, options, reason):
    found, registered = with_cuda(monkeypatch, **options)
    assert (found.platforms, found.reason, registered) == (("cpu",), None, {})
    monkeypatch.setattr(native, "library", lambda: found)
    assert re.search(reason, native.why_not("cuda"))


def test_the_reason_for_another_platform():
    assert native.why_not("cpu") is None
    assert native.why_not("tpu") == "this build of jaxlowprec has no kernels for platform 'tpu'"


def test_the_handlers_of_floats_refuse_int4():
    shape, int4 = jax.ShapeDtypeStruct, jlp.Int4().attributes
    x = jnp.ones((4, 128), jnp.bfloat16)
    codes, scale = shape((4, 64), jnp.uint8), shape((4, 1), jnp.bfloat16)
    flags = ("rowwise", "columnwise", "rotate_columns", "stochastic", "encode_scale_given", "eden")
    options = {flag: flag == "rowwise" for flag in flags} | {"format": int4, "sign_mask": np.int32(0)}
    with pytest.raises(jax.errors.JaxRuntimeError, match="kInt4"):
        jax.ffi.ffi_call("jaxlowprec_quantize", (codes, scale))(x, **options)
    arrays = [jnp.ones(s.shape, s.dtype) for s in (codes, scale)]
    options = {"format": int4, "rotate": False, "sign_mask": np.int32(0)}
    with pytest.raises(jax.errors.JaxRuntimeError, match="kInt4"):
        jax.ffi.ffi_call("jaxlowprec_dequantize", shape(x.shape, x.dtype))(*arrays, **options)


@pytest.mark.parametrize("fmt", [jlp.Int4(), jlp.MXFP4(), jlp.NVFP4((16, 16))], ids=str)
def test_the_row_scaled_handler_refuses_other_formats(fmt):
    shape = jax.ShapeDtypeStruct
    results = shape((4,), jnp.float32), shape((4, 64), jnp.uint8), shape((4, 8), jnp.float8_e4m3fn)
    call = jax.ffi.ffi_call("jaxlowprec_row_scaled_quantize", results)
    with pytest.raises(jax.errors.JaxRuntimeError, match="kTwoLevel && !format->tiles"):
        call(jnp.ones((4, 128), jnp.bfloat16), format=fmt.attributes)


def test_an_instruction_set_that_is_not_here_is_refused_by_name():
    with pytest.raises(ValueError, match=r"use_isa: 'mmx' is not available here; these are: \(.*'portable'\)"):
        native.use_isa("mmx")


def test_every_instruction_set_can_be_chosen_with_the_same_bytes(isa):
    """tests/cpp compares all kernels; this is about the choice."""
    x, found = random_array((33, 50), "bfloat16"), []
    quantize = functools.partial(jlp.quantize_both, fmt=jlp.NVFP4(), hadamard_columnwise=True)
    for name in native.available_isas():
        native.use_isa(name)
        assert native.isa() == name
        found.append(quantize(x))
    native.use_isa(isa)
    for one in found[1:]:
        assert_same_bytes(one, found[0])
