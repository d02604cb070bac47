"""The reference lists exactly the public names, and what it says of arguments, commands and variables is there."""

import importlib
import inspect
import re

import pytest

from jaxlowprec.cli.main import main
from tests.docs.test_site import script
from tests.package.test_readme import ROOT

REFERENCE = ROOT / "docs" / "reference"
NAMES = script("names")
_READERS = (  # environment variables, and fields of recipes whose defaults they are
    re.compile(r'(?:getenv|environ\.get|environment_flag)\(f?"JAXLOWPREC_(\w+)"'),
    re.compile(r'(?:flag|choice|setting)\("(?!JAXLOWPREC)([A-Z][A-Z0-9_]+)"'),
)


def page_of(module):
    return REFERENCE / f"{module.rpartition('.')[2]}.md"


def listed(module):
    """What a page shows, without the module."""
    return re.findall(rf"^::: {re.escape(module)}\.(\w+)$", page_of(module).read_text(), re.MULTILINE)


def found(module, name):
    return getattr(importlib.import_module(module), name)


PAGES = [module.__name__ for module in NAMES.modules()]
SHOWN = [(module, name) for module in PAGES for name in listed(module)]


@pytest.mark.parametrize("module", PAGES)
def test_a_page_lists_the_public_names(module):
    names = listed(module)
    assert len(names) == len(set(names)) > 0
    for name in names:
        assert found(module, name) is not None
    assert set(names) == set(NAMES.names(importlib.import_module(module)))


def test_the_page_of_all_names_has_each_once():
    page = NAMES.PAGE.read_text()
    assert page == NAMES.page(), "run scripts/site/names.py"
    linked = re.findall(r"\[`\w+`\]\(\w+\.md#([\w.]+)\)", page)
    objects = [found(*name.rsplit(".", 1)) for name in linked]
    assert len(set(map(id, filter(callable, objects)))) == len([o for o in objects if callable(o)]) > 200
    assert len(set(linked)) == len(linked)


def test_no_module_stands_where_a_page_shows_a_function():
    names = [f"{module}.{name}" for module, name in SHOWN]
    modules = {name for name in names if (ROOT / (name.replace(".", "/") + ".py")).exists()}
    assert not modules


def test_the_index_links_every_page():
    index = (REFERENCE / "index.md").read_text()
    for page in REFERENCE.glob("*.md"):
        assert page.name == "index.md" or f"({page.name})" in index, page.name


def arguments(docstring):
    """The names that the section "Arguments:" explains; several may share a line: `a, b: text`."""
    section = re.search(r"^Arguments:\n((?:(?: +.*)?\n)+)", docstring + "\n\n", re.MULTILINE)
    lines = re.findall(r"^ {4}([\w*]+(?:, [\w*]+)*):", section[1], re.MULTILINE) if section else []
    return [name.lstrip("*") for line in lines for name in line.split(", ")]


def parameters(documented):
    """Of a function, or of a class with the fields of its bases; None where any keyword is taken."""
    signature = inspect.signature(documented).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.values()):
        return None
    return set(signature).union(*(getattr(base, "__annotations__", {}) for base in getattr(documented, "__mro__", ())))


def unknown_arguments(module, name):
    """What a name's docstring explains as an argument, and its signature does not have."""
    documented = found(module, name)
    is_error = isinstance(documented, type) and issubclass(documented, Exception)
    there = parameters(documented) if callable(documented) and not is_error else None
    return set() if there is None else set(arguments(inspect.getdoc(documented) or "")) - there


def test_documented_arguments_are_parameters():
    unknown = {f"{module}.{name}": names for module, name in SHOWN if (names := unknown_arguments(module, name))}
    assert SHOWN and not unknown


def test_the_page_lists_every_command_and_option(capsys):
    text = (REFERENCE / "cli.md").read_text()

    def help_of(*words):
        with pytest.raises(SystemExit):
            main([*words, "--help"])
        return capsys.readouterr().out

    commands = re.search(r"\{([\w,]+)\}", help_of())[1].split(",")
    for command in commands:
        assert f"`jaxlowprec {command}" in text
        for option in re.findall(r"^  (--[\w-]+)", help_of(command), re.MULTILINE):
            assert option in text, f"{command} {option}"


def test_the_page_of_variables_has_exactly_those_that_are_read():
    shown = set(re.findall(r"^\| `JAXLOWPREC_(\w+)`", (REFERENCE / "environment.md").read_text(), re.MULTILINE))
    read = set()
    for folder in ("jaxlowprec", "benchmarks", "xla_ffi"):
        for path in (p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".cc")):
            read.update(*(reader.findall(path.read_text()) for reader in _READERS))
    assert shown == read | {"CUDA", "ISAS"}  # those are CMake's
