"""scripts/check_docstrings.py: a docstring begins with its subject, in this package and in general."""

import subprocess
import sys

import pytest

from tests.scripts.stand_ins import SOURCE

SCRIPT = SOURCE / "scripts" / "check_docstrings.py"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="not in the source tree")


def check(folder):
    return subprocess.run([sys.executable, SCRIPT, folder], capture_output=True, text=True, check=False)


def test_every_docstring_begins_with_its_subject():
    assert check(SOURCE / "jaxlowprec").stderr == ""


@pytest.mark.parametrize(
    "source",
    [
        '"""What a module holds."""',
        'class A:\n    """The same for A."""',
        'class A:\n    def f(self):\n        """As `g`."""',
        'SIZE = 1\n"""Of a block."""',
    ],
)
def test_a_docstring_without_its_subject_is_found(tmp_path, source):
    (tmp_path / "a.py").write_text(source)
    answer = check(tmp_path)
    assert answer.returncode == 1
    assert f"a.py:{source.count(chr(10)) + 1}: begins without its subject" in answer.stderr


@pytest.mark.parametrize("source", ['"""Offsets of blocks."""', 'x = f("What is this?")', "# As a comment"])
def test_other_texts_pass_the_check_of_docstrings(tmp_path, source):
    (tmp_path / "a.py").write_text(source)
    assert check(tmp_path).returncode == 0
