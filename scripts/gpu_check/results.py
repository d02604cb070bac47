"""Records each test's result as it comes, so that a run that is cut off leaves its results and the next one goes on.

A pytest plugin (`-p results`, with this folder on PYTHONPATH). FILE gets one JSON line when a test starts and one when
it ends; a later line replaces an earlier one of the same test. Tests that passed before under the same key are left
out; tests that failed, or ran when the run ended, come last.

    --results FILE   file to append to
    --before FILE    copy of FILE from before the run (workers of pytest-xdist start while FILE grows)
    --key KEY        device and library that a result holds for; the digest of the test's own file is added to it
    --tool NAME      checker that the tests run under, such as memcheck
    --run NAME       name of this run

    python results.py count FILE RUN      results of a run; exits with 1 if a test failed or did not end
    python results.py void FILE TOOL      tests that passed under a checker count no more: the checker found an error
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import pathlib
import re

import pytest

MOST_NAMES = 20  # failed tests that `count` names
# After these errors every later call in the process fails too: the CUDA context is lost.
CONTEXT_LOST = re.compile(
    r"CUDA_ERROR_(ILLEGAL_ADDRESS|ILLEGAL_INSTRUCTION|LAUNCH_FAILED|LAUNCH_TIMEOUT|MISALIGNED_ADDRESS|ASSERT|INVALID_PC"
    r"|INVALID_ADDRESS_SPACE|HARDWARE_STACK_ERROR)|illegal memory access|unspecified launch failure"
)


def read(path: pathlib.Path) -> list[dict]:
    """The lines of a file; the last one may be cut off."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def append(path: pathlib.Path, **record) -> None:
    """Adds a line, at once; a line that was cut off before it is ended first."""
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(record).encode() + b"\n")


def latest(records: list[dict], tool: str) -> dict[tuple[str, str], str]:
    """The last outcome of each test and key under a checker; "started" if the test did not end."""
    found: dict[tuple[str, str], str] = {}
    for record in records:
        if record.get("tool") != tool:
            continue
        if record.get("void"):
            found.clear()
        elif "test" in record:
            found[record["test"], record["key"]] = record["outcome"]
    return found


def pytest_addoption(parser):
    group = parser.getgroup("results")
    group.addoption("--results", type=pathlib.Path)
    group.addoption("--before", type=pathlib.Path)
    group.addoption("--key", default="")
    group.addoption("--tool", default="")
    group.addoption("--run", default="")


def pytest_configure(config):
    if config.option.results:
        config.pluginmanager.register(Recorder(config), "results-recorder")


class Recorder:
    """Leaves out what passed, and writes what happens."""

    def __init__(self, config):
        self.options, self.root = config.option, config.rootpath
        self.is_worker = hasattr(config, "workerinput")
        self.outcomes: dict[str, str] = {}
        before = self.options.before
        self.before = latest(read(before), self.options.tool) if before else {}
        self.left_out = any(outcome == "passed" for outcome in self.before.values())

    @functools.cache  # noqa: B019 (there is one recorder)
    def key(self, file: str) -> str:
        path = self.root / file
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.is_file() else ""
        return f"{self.options.key} {digest}"

    def write(self, **record) -> None:
        append(self.options.results, run=self.options.run, tool=self.options.tool, **record)

    def write_test(self, nodeid: str, outcome: str, **more) -> None:
        self.write(test=nodeid, key=self.key(nodeid.split("::")[0]), outcome=outcome, **more)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        outcomes = [self.before.get((item.nodeid, self.key(item.nodeid.split("::")[0]))) for item in items]
        passed = [item for item, outcome in zip(items, outcomes, strict=True) if outcome == "passed"]
        left = [(o in ("failed", "started"), item) for item, o in zip(items, outcomes, strict=True) if o != "passed"]
        items[:] = [item for _, item in sorted(left, key=lambda pair: pair[0])]
        if passed:
            config.hook.pytest_deselected(items=passed)

    def pytest_collection_finish(self, session):
        if not self.is_worker and session.items:
            self.write(collected=len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node, ids):
        if "collected" not in self.outcomes:
            self.outcomes["collected"] = str(len(ids))
            self.write(collected=len(ids))

    def pytest_runtest_logstart(self, nodeid):
        if not self.is_worker:
            self.write_test(nodeid, "started")

    def pytest_runtest_logreport(self, report):
        ends = report.failed or (report.when == "call") or (report.when == "setup" and report.skipped)
        if self.is_worker or not ends:
            return
        if self.outcomes.get(report.nodeid) == "failed":
            return
        self.outcomes[report.nodeid] = report.outcome
        why = "" if report.passed else str(report.longrepr)[-600:]
        self.write_test(report.nodeid, report.outcome, seconds=round(report.duration, 2), why=why)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item):
        report = (yield).get_result()
        if report.failed and CONTEXT_LOST.search(str(report.longrepr)):
            if self.is_worker:  # pytest-xdist reports this test as failed and starts another worker
                self.write_test(item.nodeid, "failed", why=str(report.longrepr)[-600:])
                os._exit(70)
            item.session.shouldstop = "the process has lost its CUDA context; a later run goes on with the other tests"

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session, exitstatus):
        if self.is_worker:
            return
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.left_out:
            session.exitstatus = pytest.ExitCode.OK
        outcomes = set(self.outcomes.values()) - {self.outcomes.get("collected")}
        if exitstatus == pytest.ExitCode.OK and outcomes == {"skipped"} and not self.left_out:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED  # no device, most likely: the reason is in the log


def count(path: pathlib.Path, run: str) -> tuple[str, bool]:
    """A run's results in words, and whether all its tests ended well."""
    records = [r for r in read(path) if r.get("run") == run]
    collected = max((r["collected"] for r in records if "collected" in r), default=0)
    outcomes: dict[str, dict] = {}
    for record in records:
        if "test" in record:
            outcomes[record["test"]] = record
    of = {kind: [t for t, r in outcomes.items() if r["outcome"] == kind] for kind in ("passed", "failed", "skipped")}
    running = [t for t, r in outcomes.items() if r["outcome"] == "started"]
    left = collected - len(outcomes)
    parts = [f"{len(tests)} {kind}" for kind, tests in of.items() if tests]
    parts += [f"{len(running)} cut off while they ran"] if running else []
    parts += [f"{left} not reached"] if left > 0 else []
    lines = [", ".join(parts) or "no test was left to run"]
    if of["passed"] == running == of["failed"] == [] and of["skipped"]:
        lines.append(f"  all skipped: {outcomes[of['skipped'][0]]['why']}")
    for kind, tests in (("failed", of["failed"]), ("cut off", running)):
        lines += [f"  {kind}: {test}" for test in tests[:MOST_NAMES]]
        lines += [f"  and {len(tests) - MOST_NAMES} more"] if len(tests) > MOST_NAMES else []
    return "\n".join(lines), not (of["failed"] or running or left > 0)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("count", "void"))
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("name", help="of the run, or the checker")
    options = parser.parse_args()
    if options.command == "void":
        append(options.file, tool=options.name, void=True)
        return 0
    said, well = count(options.file, options.name)
    print(said)
    return 0 if well else 1


if __name__ == "__main__":
    raise SystemExit(main())
