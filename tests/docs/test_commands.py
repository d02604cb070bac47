"""The commands that docs/how-to/distributed.md shows are ones that the examples accept."""

import re
import shlex
import sys

import pytest
import train_lm
from lm import mesh

from tests.package.test_readme import ROOT

PAGE = (ROOT / "docs/how-to/distributed.md").read_text()
COMMANDS = re.findall(r"^    python examples/(train_lm\.py .*?) *(?:&|#.*)?$", PAGE, re.MULTILINE)


def test_the_page_has_commands():
    assert len(COMMANDS) >= 6 and len(set(COMMANDS)) == len(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_example_accepts_it(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    monkeypatch.setattr(train_lm, "layout", lambda options: None)  # joins no processes
    options = train_lm.arguments()
    if options.mesh:
        mesh.check(mesh.parse(options.mesh), options.config, options.batch, options.sequence_parallel)
