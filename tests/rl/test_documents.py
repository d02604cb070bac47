"""The programs of the documents about engines that are not bit-equal."""

import re

from tests.docs.pages import differs
from tests.package.test_readme import ROOT, programs


def test_the_program_of_the_reference_prints_what_the_page_shows(capsys):
    (program,) = programs("docs/reference/rl.md")
    exec(program, {})
    shown = re.search(r"```text\n(.*?)```", (ROOT / "docs/reference/rl.md").read_text(), re.DOTALL)[1]
    assert not differs(capsys.readouterr().out, shown)


def test_the_programs_of_the_how_to_measure(capsys):
    """The second one goes on with what the first one made."""
    made: dict = {}
    found = programs("docs/how-to/rl.md")
    assert len(found) == 3
    for program in found:
        exec(program, made)
        shown = re.search(r"# (.*)\n", program[program.index("print(") :])[1]
        assert capsys.readouterr().out.strip() == shown
