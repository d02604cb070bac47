"""The programs of docs/how-to/weight_sync.md run as they stand, and its tables name what there is."""

import re

from jaxlowprec import weight_sync
from jaxlowprec.weight_sync.receiving import forms
from tests.package.test_readme import ROOT, programs


def test_the_programs_of_the_document_run():
    names = {}
    for program in programs("docs/how-to/weight_sync.md"):
        exec(program, names)
    assert names["receiver"].version == 1 and names["version"] == 1


def test_the_table_of_transports_names_classes_that_there_are():
    text = (ROOT / "docs" / "how-to" / "weight_sync.md").read_text()
    table = re.search(r"## Transports\n\n(.*?)\n\n", text, re.DOTALL)[1]
    named = re.findall(r"`(\w+)`", "\n".join(row.split("|")[1] for row in table.splitlines()))
    assert len(named) >= 9
    assert set(named) <= set(weight_sync.__all__)


def test_the_table_of_forms_has_them_all():
    text = (ROOT / "docs" / "how-to" / "weight_sync.md").read_text()
    table = re.search(r"\| `form` \|.*?\n\n", text, re.DOTALL)[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)[1:]) == forms.NAMES
