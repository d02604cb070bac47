"""Rules for the tests themselves: short names, and imports that pytest's `pythonpath` finds."""

import ast
import pathlib

import pytest

TESTS = pathlib.Path(__file__).parents[1]
SOURCES = sorted(TESTS.rglob("*.py"))
LONGEST_NAME = 60


def tree(source):
    return ast.parse(source.read_text())


def test_names_of_tests_are_short():
    names = {
        node.name
        for source in SOURCES
        for node in ast.walk(tree(source))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert len(names) > 1000
    assert [name for name in names if len(name) > LONGEST_NAME] == []


@pytest.mark.parametrize("method", ["insert", "append", "remove"])
def test_no_test_edits_the_import_path(method):
    edits = [str(source) for source in SOURCES if f"sys.path.{method}(" in source.read_text()]
    assert edits == []
