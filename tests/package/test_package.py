"""The package as a whole: what it imports, what it exports, and that its examples are true."""

import ast
import collections
import doctest
import functools
import importlib.metadata
import importlib.util
import pathlib
import pkgutil
import re
import sys
import tomllib
import types

import pytest

import jaxlowprec as jlp
from tests.docs.test_site import script
from tests.helpers import run_python

PACKAGE = pathlib.Path(jlp.__file__).parent
ROOT = pathlib.Path(__file__).parents[2]
MODULES = [
    "jaxlowprec",
    *(m.name for m in pkgutil.walk_packages(jlp.__path__, "jaxlowprec.") if "_native" not in m.name),
]

# Lowest first; a room imports from its own floor and those below.
FLOORS = (
    ("arguments", "locks"),
    ("arrays", "wiring"),
    ("ops",),
    ("recipes", "telemetry"),
    ("layers", "optim"),
    ("moe",),
    ("linen", "nnx"),
    ("models", "diagnostics"),
    ("checkpoints", "rl"),
    ("weight_sync",),
    ("cli",),
    (
        "checkpoint_policies",
        "debug",
        "decoder",
        "kv",
        "delayed_scaling",
        "layouts",
        "lora",
        "traffic",
    ),  # names of rooms' modules
)
RANK = {name: rank for rank, names in enumerate(FLOORS) for name in names}


def test_the_public_names_of_the_design_are_there():
    names = """
        NVFP4 Hadamard DEFAULT_SIGNS QuantizedArray quantize quantize_both dequantize hadamard_transform scaled_matmul
        autocast current_recipe linear quantize_kernel dot_general einsum NVFP4BlockScaling linen nnx
        MXFP8 MXFP4 Float8Block Float8Tensor layouts delayed_scaling
        MXFP8BlockScaling Float8BlockScaling Float8CurrentScaling DelayedScaling Custom MMParams QParams
        Int4 Int4QAT WeightQAT fake_quantize explain quantize_params all_gather_quantized traffic moe
        all_reduce_quantized reduce_scatter_quantized all_to_all_quantized Sums
        all_gather_kernel all_gather_matmul matmul_reduce_scatter
        grouped_matmul ragged_dot weight_sync supported checkpoint_policies
    """.split()  # noqa: SIM905
    assert set(names) <= set(jlp.__all__)
    for name in jlp.__all__:
        assert getattr(jlp, name) is not None
    assert {"Dense", "DenseGeneral", "Einsum", "Conv", "GroupedDense", "MoE"} <= set(jlp.linen.__all__)
    assert {"Linear", "LinearGeneral", "Einsum", "Conv", "GroupedLinear", "MoE"} <= set(jlp.nnx.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'float3'"):
        jlp.float3  # noqa: B018


def test_the_package_has_a_version():
    assert jlp.__version__ == importlib.metadata.version("jaxlowprec")


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").is_file()


ROOMS_AT_IMPORT = """
    arguments arrays checkpoint_policies delayed_scaling layers layouts locks ops recipes telemetry wiring
""".split()  # noqa: SIM905
MOST_MODULES_AT_IMPORT = {"jaxlowprec": 150, "jax": 45, "others": 15}  # most of jax are those of jax.extend


def test_importing_loads_few_modules_and_no_flax():
    """How long importing takes is up to the machine; benchmarks/import_time.py measures it."""
    code = """
import sys
import jax
before = set(sys.modules)
import jaxlowprec
print(*set(sys.modules) - before)
assert "flax" not in sys.modules
from jaxlowprec import nnx
assert "flax" in sys.modules
assert jaxlowprec.nnx is nnx
"""
    loaded = [name.split(".") for name in run_python("-c", code).stdout.split()]
    assert {name[1] for name in loaded if name[0] == "jaxlowprec" and len(name) > 1} == set(ROOMS_AT_IMPORT)
    packages = {name[0] for name in loaded} - sys.stdlib_module_names
    assert packages <= {"jaxlowprec", "jax", "jaxlib", "jaxtyping", "numpy"}
    counts = collections.Counter(name[0] if name[0] in MOST_MODULES_AT_IMPORT else "others" for name in loaded)
    assert all(counts[package] <= most for package, most in MOST_MODULES_AT_IMPORT.items()), counts


@pytest.mark.parametrize("folder", ["jaxlowprec", "examples", "benchmarks"])
def test_no_source_uses_jaxs_internals(folder):
    sources = list((ROOT / folder).rglob("*.py"))
    assert sources
    for source in sources:
        text = source.read_text()
        assert "jax._src" not in text and "jaxlib.xla" not in text, source


@functools.cache
def source_of(name):
    return pathlib.Path(importlib.util.find_spec(name).origin).read_text()


@functools.cache
def tree_of(name):
    return ast.parse(source_of(name))


def imported(tree, package):
    """The modules of this package that a syntax tree imports, within functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{package}: relative import"
            for alias in node.names:
                yield node.module if node.module != "jaxlowprec" else f"jaxlowprec.{alias.name}"
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_every_module_can_be_imported():
    for name in MODULES:
        importlib.import_module(name)


def when_imported(body):
    """The imports that run with a module: those outside of functions, of `if TYPE_CHECKING` and of `try`."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.ClassDef) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test)
        ):
            yield from when_imported(node.body)


def test_importing_any_module_needs_no_extra():
    requirements = importlib.metadata.requires("jaxlowprec")
    needed = {re.match(r"[\w-]+", text)[0] for text in requirements if "extra ==" not in text}
    assert {"jax", "flax", "numpy"} <= needed
    for name in MODULES:
        nodes = ast.Module(list(when_imported(tree_of(name).body)), [])
        packages = {module.split(".")[0] for module in imported(nodes, name)}
        assert packages <= {"jaxlowprec", "jaxlowprec_command", *needed, *sys.stdlib_module_names}, name


def upwards(name):
    """The modules above its own floor that a module imports."""
    below = RANK[name.split(".")[1]]
    return {
        module
        for module in imported(tree_of(name), name)
        if module.startswith("jaxlowprec.") and RANK.get(module.split(".")[1], -1) > below
    }


def test_imports_point_one_way():
    found = {name: modules for name in MODULES[1:] if (modules := upwards(name))}
    # QuantizedArray.dequantize() is the op's shorthand, looked up when it is called.
    assert found == {"jaxlowprec.arrays.quantized_array": {"jaxlowprec.ops.dequantize"}}


SERVING = ("checkpoints", "weight_sync", "rl", "cli")
ELSEWHERE = {
    "jaxlowprec",
    "jaxlowprec_command",
    "torch",  # in vLLM's process, which has it
    "vllm",
    "rich",  # `jaxlowprec watch` asks for the extra `report`
    "matplotlib",  # `inspect --plot` asks for it
}


def room(name):
    return name.split(".")[1] if name.startswith("jaxlowprec.") else ""


def test_the_core_imports_nothing_of_the_serving_half():
    """`jaxlowprec` itself names those rooms and imports them when they are asked for: `ROOMS_AT_IMPORT`."""
    core = [name for name in MODULES[1:] if room(name) not in SERVING]
    found = {
        name: modules for name in core if (modules := {m for m in imported(tree_of(name), name) if room(m) in SERVING})
    }
    assert len(core) > 100 and found == {}


def test_the_extra_serve_brings_what_the_serving_half_imports():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["serve"]]
    brought = {re.match(r"[\w-]+", requirement)[0] for requirement in needed}
    serving = [name for name in MODULES if room(name) in SERVING]
    packages = {module.split(".")[0] for name in serving for module in imported(tree_of(name), name)}
    assert {"jax", "cryptography", "gguf", "tokenizers"} <= packages
    assert packages - sys.stdlib_module_names - ELSEWHERE <= brought


def test_linen_and_nnx_do_not_import_each_other():
    for room, other in (("linen", "nnx"), ("nnx", "linen")):
        names = [name for name in MODULES if name.split(".")[1:2] == [room]]
        found = {module for name in names for module in imported(tree_of(name), name)}
        assert names and not any(module.split(".")[:2] == ["jaxlowprec", other] for module in found), room


MOST_POSITIONAL = 7


def positional(function):
    """The parameters of a function's syntax tree that a call may give by position, without self and cls."""
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    return [name for name in names if name not in ("self", "cls")]


def test_functions_take_few_positional_parameters():
    assert not {
        f"{name}.{node.name}"
        for name in MODULES
        for node in ast.walk(tree_of(name))
        if isinstance(node, ast.FunctionDef) and len(positional(node)) > MOST_POSITIONAL
    }


def test_every_room_has_its_floor_and_says_what_lives_there():
    assert {name.split(".")[1] for name in MODULES[1:]} == set(RANK)
    for folder in {source.parent for source in PACKAGE.rglob("*.py")}:
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder


PUBLIC = list(script("names").modules())


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_public_names_exist_and_shadow_no_module(module):
    assert module.__all__ and set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        value = getattr(module, name)
        assert isinstance(value, types.ModuleType) or f"{module.__name__}.{name}" not in MODULES


def test_dir_shows_the_public_names_alone():
    assert set(dir(jlp)) == set(jlp.__all__)


WITH_EXAMPLES = [name for name in MODULES if ">>> " in source_of(name)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_in_docstrings_are_true(name):
    failures, _ = doctest.testmod(importlib.import_module(name))
    assert failures == 0


def test_every_public_function_has_an_example():
    public = {f"jlp.{name}": getattr(jlp, name) for name in jlp.__all__}
    public |= {f"jlp.moe.{name}": getattr(jlp.moe, name) for name in jlp.moe.__all__}
    finder = doctest.DocTestFinder(recurse=False)
    without = {
        name
        for name, value in public.items()
        if callable(value) and not isinstance(value, type) and not finder.find(value)[0].examples
    }
    assert without == {"jlp.current_recipe"}
