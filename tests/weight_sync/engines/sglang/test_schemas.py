"""What is sent to SGLang, beside the request models and routes in the source of the installed package.

The package is not imported: that takes its hundred dependencies and a GPU.
"""

import ast
import importlib.metadata
import importlib.util
import pathlib
import typing

import pytest

from jaxlowprec.weight_sync import SGLang, SGLangTensors
from jaxlowprec.weight_sync.engines import sglang
from tests.weight_sync.engines.engine_stubs import SGLangStub, serving
from tests.weight_sync.engines.sglang.stub import TensorsStub
from tests.weight_sync.syncing import sync

REMEDY = "sglang is not installed: pip install --no-deps sglang==0.5.23"
MODELS = {
    "/pause_generation": "PauseGenerationReqInput",
    "/continue_generation": "ContinueGenerationReqInput",
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "/begin_weight_update": "BeginWeightUpdateReqInput",
    "/end_weight_update": "EndWeightUpdateReqInput",
    "/update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
}
PAUSED, DISK = {"/pause_generation", "/continue_generation"}, {"/update_weights_from_disk"}
KINDS = {
    "str": str,
    "bool": bool,
    "int": int,
    "Optional[str]": str | None,
    "Optional[Dict[str, Any]]": dict | None,
    "Annotated[List[bytes], Base64Bytes()]": list,
}


@pytest.fixture(scope="module")
def srt():
    """The folder of SGLang's source."""
    found = importlib.util.find_spec("sglang")
    if found is None:
        pytest.skip(REMEDY)
    return pathlib.Path(found.origin).parent / "srt"


@pytest.fixture(scope="module")
def fields(srt):
    """For each route the fields of its request: {name: (type, whether it is required)}."""
    classes = {
        node.name: node
        for node in ast.parse((srt / "managers/io_struct.py").read_text()).body
        if isinstance(node, ast.ClassDef)
    }

    def of(name):
        found = [node for node in classes[name].body if isinstance(node, ast.AnnAssign)]
        return {node.target.id: (kind(ast.unparse(node.annotation)), node.value is None) for node in found}

    return {route: of(name) for route, name in MODELS.items()}


def kind(annotation):
    if annotation.startswith("Literal["):
        return typing.Literal[tuple(ast.literal_eval(annotation.removeprefix("Literal")))]
    return KINDS[annotation]


def is_a(value, kind):
    options = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else None
    return value in options if options else isinstance(value, kind)


@pytest.fixture(scope="module")
def routes(srt):
    """(method, path) of each route whose path is written out."""
    found = set()
    for node in ast.walk(ast.parse((srt / "entrypoints/http_server.py").read_text())):
        for decorator in getattr(node, "decorator_list", ()):
            if not isinstance(decorator, ast.Call) or not ast.unparse(decorator.func).startswith("app."):
                continue
            if not decorator.args or not isinstance(decorator.args[0], ast.Constant):
                continue
            verb, path = decorator.func.attr, decorator.args[0].value
            methods = [k.value for k in decorator.keywords if k.arg == "methods"]
            found |= {(m, path) for m in (ast.literal_eval(methods[0]) if methods else [verb.upper()])}
    return found


def recording(stub):
    """A stub, and the list of what is sent to it."""
    sent, answer = [], stub.answer

    def recorded(method, path, query, body):
        sent.append((method, path, body))
        return answer(method, path, query, body)

    stub.answer = recorded
    return stub, sent


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
@pytest.mark.parametrize("by_disk", [True, False])
def test_every_call_is_one_that_the_package_has(by_disk, mode, routes, fields, tmp_path):
    stub, sent = recording(SGLangStub() if by_disk else TensorsStub())
    with serving(stub) as url:
        transport = SGLang(url, tmp_path, mode=mode) if by_disk else SGLangTensors(url, mode=mode, memory="copied")
        sync(transport, 1)
        transport.version(60)
    assert {path for _, path, _ in sent} & set(MODELS) == PAUSED | (DISK if by_disk else set(MODELS) - PAUSED - DISK)
    for method, path, body in sent:
        assert (method, path) in routes
        if path in MODELS:
            known = fields[path]
            assert all(name in body for name, (_, required) in known.items() if required)
            assert all(is_a(value, known[name][0]) for name, value in body.items())


@pytest.mark.parametrize("stub", [SGLangStub, TensorsStub])
def test_the_stub_takes_no_field_that_the_package_lacks(stub, fields):
    for (_, path), (taken, _, _) in stub.routes.items():
        if path in MODELS:
            assert set(taken) <= set(fields[path])
            assert {name for name, (_, required) in taken.items() if required} == {
                name for name, (_, required) in fields[path].items() if required
            }


def test_the_package_restores_int4_where_the_adapter_says(srt):
    """`sglang.check_int4` refuses other INT4 weights: of dense layers, and of other formats."""
    assert importlib.metadata.version("sglang").split(".")[:3] == [str(number) for number in sglang.NEWEST_READ]
    hook = "def restore_weights_before_loading("
    with_a_hook = {path.name for path in (srt / "layers").rglob("*.py") if hook in path.read_text()}
    assert with_a_hook == {
        "base_config.py",  # does nothing
        "compressed_tensors_scheme.py",  # does nothing
        "compressed_tensors.py",  # of experts: the scheme's
        "compressed_tensors_wNa16_moe.py",
        "unquant.py",  # not quantised
    }
