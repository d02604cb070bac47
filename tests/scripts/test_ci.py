""".ci/parts: every test is in a part that runs slow tests, so within four commits CI has run it."""

import os
import pathlib
import shutil
import subprocess

import pytest

from tests.scripts.stand_ins import SOURCE

PARTS = SOURCE / ".ci/parts"
pytestmark = pytest.mark.skipif(not PARTS.exists(), reason="not in the source tree")
ELSEWHERE = ("tests/gpu",)  # needs one: scripts/gpu_check.sh


def parts():
    """When, minutes, name and command of each."""
    lines = [line for line in PARTS.read_text().splitlines() if line and not line.startswith("#")]
    return [line.split(maxsplit=3) for line in lines]


def test_the_parts_are_well_formed():
    assert {when for when, *_ in parts()} == {"each", "0", "1", "2", "3"}
    names = [name for _, _, name, _ in parts()]
    assert len(set(names)) == len(names)
    assert sum(int(minutes) for when, minutes, *_ in parts() if when == "each") <= 40  # so that others have a turn
    assert all(int(minutes) <= 12 for when, minutes, *_ in parts() if when != "each")


def covered(command):
    """The files of tests that a command runs the slow ones of."""
    words = [word for word in command.split()[1:] if word.startswith(("tests/", "--ignore=tests/"))]
    without = tuple(word.removeprefix("--ignore=") for word in words if word.startswith("--"))
    for word in words:
        if not word.startswith("--"):
            assert (SOURCE / word).exists(), word
            found = (SOURCE / word).rglob("test_*.py") if (SOURCE / word).is_dir() else [SOURCE / word]
            yield from (file for file in found if not within(file, without))


def within(file, folders):
    return any(pathlib.Path(SOURCE / folder) in (file, *file.parents) for folder in folders)


def test_every_file_of_tests_is_in_a_part_with_its_slow_ones():
    commands = [command for *_, command in parts() if command.startswith(("slow", "with_", "tpu --slow"))]
    found = {file for command in commands for file in covered(command)}
    every = {file for file in (SOURCE / "tests").rglob("test_*.py") if not within(file, ELSEWHERE)}
    assert sorted(map(str, every - found)) == []


def begun(done):
    return [line.split()[1] for line in done.stdout.splitlines() if line.startswith("=== ")]


class TestRun:
    """Of .ci/run, in a copy whose parts are only words."""

    @pytest.fixture
    def run(self, tmp_path):
        def run(*arguments, parts, commits=4, **variables):
            (tmp_path / ".ci").mkdir(exist_ok=True)
            script = (SOURCE / ".ci/run").read_text().replace("run preparation prepare\n", "")
            (tmp_path / ".ci/run").write_text(script)
            (tmp_path / ".ci/parts").write_text(parts)
            git = tmp_path / "bin/git"
            git.parent.mkdir(exist_ok=True)
            git.write_text(f"#!/bin/sh\necho {commits}\n")
            git.chmod(0o755)
            given = {key: value for key, value in os.environ.items() if key != "RELEASE"}
            given |= {
                "PATH": f"{git.parent}:{os.environ['PATH']}",
                "XDG_CACHE_HOME": str(tmp_path / "cache"),
            } | variables
            command = [shutil.which("bash"), tmp_path / ".ci/run", *arguments]
            return subprocess.run(command, env=given, capture_output=True, text=True, check=False)

        return run

    PARTS = "# a comment\neach 1 first echo first\n0 1 zero echo zero\n1 1 one echo one\n0 99 long echo long\n"

    def test_a_commit_takes_its_quarter_and_says_what_is_left_out(self, run):
        done = run(parts=self.PARTS)
        assert done.returncode == 0
        assert begun(done) == ["first", "zero"]
        assert "left out   long, which takes 99 minutes" in done.stdout

    def test_the_next_commit_takes_another(self, run):
        done = run(parts=self.PARTS, commits=5)
        assert begun(done) == ["first", "one"]

    def test_a_quarter_begins_with_another_part_every_fourth_commit(self, run):
        done = run(parts="each 1 first echo\n0 1 a echo\n0 1 b echo\n0 1 c echo\n", commits=8)
        assert begun(done) == ["first", "c", "a", "b"]

    def test_a_release_runs_all_or_what_is_named(self, run):
        done = run(parts=self.PARTS, RELEASE="1")
        assert begun(done) == ["first", "zero", "one", "long"]
        done = run("one", "long", parts=self.PARTS, RELEASE="1")
        assert begun(done) == ["one", "long"]

    def test_a_name_that_is_none_is_refused(self, run):
        done = run("two", parts=self.PARTS, RELEASE="1")
        assert done.returncode == 1 and "no part of this run is called two" in done.stderr

    def test_the_first_part_that_fails_ends_the_run(self, run):
        done = run(parts="each 1 first false\neach 1 second echo\n")
        assert done.returncode == 1 and "FAILED in minute 0: first" in done.stdout and begun(done) == ["first"]
