"""`jaxlowprec info`: what runs here, how, and why not otherwise."""

import json

import jax
import pytest

from jaxlowprec import native
from jaxlowprec.cli.main import main
from tests.helpers import run_python

EMULATED = {"scaled_matmul, 4-bit", "scaled_matmul, 8-bit"}
OPERATIONS = {"quantize", "amax", "dequantize", "hadamard_transform"} | EMULATED


def info(capsys, *arguments):
    assert main(["info", *arguments]) == 0
    return capsys.readouterr().out


def test_json_says_what_runs_how(capsys, isa):
    found = json.loads(info(capsys, "--json"))
    assert found["versions"]["jax"] == jax.__version__
    assert found["native_library"]["loaded"] and found["native_library"]["reason"] is None
    assert found["native_library"]["instruction_set"] == isa
    assert found["native_library"]["instruction_sets_available"] == list(native.available_isas())
    runs = {operation["operation"]: operation["platforms"]["cpu"] for operation in found["operations"]}
    assert set(runs) == OPERATIONS
    for name, how in runs.items():
        assert how["runs"] == ("emulated" if name in EMULATED else "native"), name
        assert how["why"]


def test_the_table_has_the_same_facts(capsys):
    found, text = json.loads(info(capsys, "--json")), info(capsys)
    for package, version in found["versions"].items():
        assert version is None or version in text, package
    assert found["native_library"]["instruction_set"] in text
    for operation in found["operations"]:
        (row,) = (line for line in text.splitlines() if line.startswith(operation["operation"] + " "))
        for platform, how in operation["platforms"].items():
            assert platform in row and how["runs"] in row and how["why"] in row


def test_a_fresh_process_without_the_library_says_reference_and_why():
    out = run_python("-m", "jaxlowprec.cli.main", "info", "--json", JAXLOWPREC_DISABLE_NATIVE="1").stdout
    found = json.loads(out)
    assert not found["native_library"]["loaded"]
    for operation in found["operations"]:
        cpu = operation["platforms"]["cpu"]
        assert cpu == {"runs": "reference", "why": "JAXLOWPREC_DISABLE_NATIVE is set"}


def test_without_a_command_it_explains_itself(capsys):
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    assert "info" in capsys.readouterr().err
