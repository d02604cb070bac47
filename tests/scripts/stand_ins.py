"""A small source tree with the real scripts, and programs that stand in for NVIDIA's tools."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

SOURCE = pathlib.Path(__file__).parents[2]
SCRIPTS = SOURCE / "scripts"
needs_scripts = pytest.mark.skipif(not (SCRIPTS / "gpu_check.sh").exists(), reason="not in the source tree")

MODULES = (
    "runtime",
    "assumptions",
    "matmul",
    "quantize",
    "training",
    "golden",
    "int4",
    "grouped",
    "statistics",
    "producers",
    "optimizer",
)
ONE_TEST = """
import pytest

@pytest.mark.gpu
@pytest.mark.sanitize
def test_every_kernel_once():
    pass

@pytest.mark.gpu
def test_{name}():
    pass

@pytest.mark.gpu
@pytest.mark.slow
def test_large():
    pass
"""
CONFTEST = """
import pytest

def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true")
"""
# Rows with the real file, and without JAX. FAULTS: rows that fail; SLEEP: a row that takes so long.
BENCHMARK = """
import argparse, os, pathlib, sys, time
import sources
from gpu_file import UNFINISHED, Results

ROWS = {"training": 1.3, "few rows": 1.0, "quantize": 0.4, "hadamard": 0.8, "gemm": 0.9}
parser = argparse.ArgumentParser()
parser.add_argument("--save", type=pathlib.Path)
parser.add_argument("--only", nargs="+")
parser.add_argument("--row")
parser.add_argument("--trace", type=pathlib.Path)
parser.add_argument("--again", action="store_true")
parser.add_argument("--divide", type=int, default=1)
parser.add_argument("--rounds", type=int)
options = parser.parse_args()
if options.row:
    print("launched", options.row)
    if options.trace:
        options.trace.write_text('[{"kernel": "k", "launches": 2, "seconds": 1e-6}]')
    sys.exit()
environment = {"device": "cpu", "driver": None, "cuda": "", "versions": {"jax": "0"}, "commit": "c", "rows": len(ROWS),
               "sources": sources.digest(), "divide": options.divide}
results = Results(options.save, environment, options.again)
for case, ratio in ROWS.items():
    row = {"case": case, "against": "theirs", "target": 1.0}
    if results.measured((case, "theirs")) or (options.only and case not in options.only):
        continue
    print("measures", case, flush=True)
    results.put(row | {"error": UNFINISHED})
    time.sleep(float(os.environ.get("SLEEP", 0)) if case == "quantize" else 0)
    fails = case in os.environ.get("FAULTS", "").split(",")
    results.put(row | ({"error": "broken"} if fails else {"ratio": {"median": ratio}}))
sys.exit(any("error" in case for case in results.cases))
"""
NCU_CSV = """==PROF== Connected
"ID","Kernel Name","gpu__time_duration.sum","dram__bytes.sum.per_second","dram__throughput.avg.pct_of_peak_sustained_elapsed","sm__warps_active.avg.pct_of_peak_sustained_active","sm__maximum_warps_per_active_cycle_pct","launch__registers_per_thread","smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio","smsp__average_warps_issue_stalled_selected_per_issue_active.ratio","smsp__average_warps_issue_stalled_wait_per_issue_active.ratio"
"","","ns","byte/s","%","%","%","register/thread","inst","inst","inst"
"0","jaxlowprec::amax(float)","2,000","1,000,000,000,000","21","40","75","64","12.5","1","0.5"
"1","jaxlowprec::amax(float)","4,000","3,000,000,000,000","63","60","75","64","11.5","1","1.5"
"2","jaxlowprec::quantize(float)","90,000","3,500,000,000,000","73","88","100","40","3","1","2"
"""  # noqa: E501
NCU = f"""
while (($#)); do [[ $1 != --log-file ]] || log=$2; shift; done
cat >"$log" <<'CSV'
{NCU_CSV}CSV
"""
SANITIZER = """
while [[ $1 == --* ]]; do
  case $1 in --tool | --kernel-name | --error-exitcode) shift 2 ;; *) shift ;; esac
done
"$@" || exit
echo "========= ERROR SUMMARY: ${ERRORS:-0} errors"
exit $((${ERRORS:-0} ? 3 : 0))
"""
NVIDIA_SMI = """
case "$*" in
  *query-gpu=name*) echo "NVIDIA H200" ;;
  *query-gpu=compute_cap*) echo 9.0 ;;
  *) echo "| NVIDIA-SMI 580.1   Driver Version: 580.1   CUDA Version: 13.0 |" ;;
esac
"""


def program(folder: pathlib.Path, name: str, script: str) -> pathlib.Path:
    """A bash script on its own, executable."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)
    return path


@dataclasses.dataclass
class Repository:
    """The tree, the folder with the stand-ins for tools, and the folder for results."""

    root: pathlib.Path
    tools: pathlib.Path
    out: pathlib.Path

    def environment(self, **variables):
        settings = ("ONLY", "AGAIN", "RESUME", "MINUTES", "WHEEL", "PYTEST_ADDOPTS")
        kept = {k: v for k, v in os.environ.items() if k not in settings and not k.startswith("PYTEST_XDIST")}
        path = f"{self.tools}{os.pathsep}{os.environ['PATH']}"
        mine = {"PATH": path, "PYTHON": sys.executable, "PYTHONPATH": str(self.tools / "python"), "WORKERS": "0"}
        mine |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}  # other plugins start slowly
        return kept | mine | {"DRY_RUN": "1", "JAXLOWPREC_COMMIT": "abc"} | variables

    def start(self, *phases, script="gpu_check.sh", **variables):
        return subprocess.Popen(
            [self.root / "scripts" / script, self.out, *phases],
            env=self.environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def check(self, *phases, **variables):
        """The exit status and what was printed."""
        process = self.start(*phases, **variables)
        try:
            printed = process.communicate(timeout=900)[0]
        except subprocess.TimeoutExpired:
            process.terminate()
            pytest.fail(f"gpu_check.sh {' '.join(phases)} did not end: {process.communicate()[0]}")
        return process.returncode, printed

    def test(self, name, text):
        (self.root / "tests" / "gpu" / f"test_{name}.py").write_text(text)

    def results(self):
        """Test names without the file, in the order in which they ended, with their outcomes."""
        lines = (self.out / "tests.jsonl").read_text().splitlines()
        records = [r for r in map(json.loads, lines) if r.get("outcome") not in (None, "started")]
        return [(r["test"].split("::")[-1], r["outcome"]) for r in records]

    def rows(self):
        return json.loads((self.out / "gpu.json").read_text())["cases"]


def make_repository(tmp_path: pathlib.Path) -> Repository:
    """Writes the tree and the tools."""
    root, tools = tmp_path / "tree", tmp_path / "tools"
    for folder in ("scripts", "benchmarks", "tests/gpu", "examples", "docs", "jaxlowprec"):
        (root / folder).mkdir(parents=True)
    for name in ("gpu_check.sh", "gpu_visit.sh"):
        shutil.copy(SCRIPTS / name, root / "scripts")
    shutil.copytree(SCRIPTS / "gpu_check", root / "scripts" / "gpu_check")
    for name in ("sources.py", "gpu_file.py", "gpu_profile.py"):
        shutil.copy(SOURCE / "benchmarks" / name, root / "benchmarks")
    (root / "benchmarks" / "gpu.py").write_text(BENCHMARK)
    shutil.copy(SOURCE / "pyproject.toml", root)
    (root / "README.md").write_text("# A tree\n")
    (root / "jaxlowprec" / "source.py").write_text("VERSION = 1\n")
    (root / "tests" / "conftest.py").write_text(CONFTEST)
    for name in MODULES:
        (root / "tests" / "gpu" / f"test_{name}.py").write_text(ONE_TEST.format(name=name))
    (tools / "python" / "jaxlowprec").mkdir(parents=True)
    (tools / "python" / "jaxlowprec" / "__init__.py").touch()
    program(tools, "nvidia-smi", NVIDIA_SMI)
    program(tools, "compute-sanitizer", SANITIZER)
    program(tools, "ncu", NCU)
    return Repository(root, tools, tmp_path / "out")
