"""Every phase of scripts/gpu_check.sh, with a CPU in the GPU's place and a few empty tests in those of tests/gpu."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.scripts.stand_ins import MODULES, SOURCE, needs_scripts, program

pytestmark = needs_scripts


COUNT = len(MODULES)  # each has a test for `once`, one for `test` and one for `slow`
NEEDED = "bash cat cp cut date dirname env grep head lscpu mkdir mv nproc rm sleep stat tail tar timeout tr"


def path_without(tools, *names):
    """A PATH that has the programs which the scripts need, but not these."""
    for name in NEEDED.split():
        if (found := shutil.which(name)) and not (tools / name).exists():
            (tools / name).symlink_to(found)
    for name in names:
        (tools / name).unlink(missing_ok=True)
    return str(tools)


def wait_for(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def kill_session(leader):
    """SIGKILL to a process and to all that it has started, workers of pytest among them."""
    for file in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            session = int(file.read_text().rpartition(")")[2].split()[3])
            if session == leader.pid:
                os.kill(int(file.parent.name), signal.SIGKILL)
    leader.communicate(timeout=600)


READS_FILES = """
import pathlib
import pytest

FILES = ("README.md", "docs/index.md", "benchmarks", "examples", "pyproject.toml")

@pytest.mark.gpu
def test_files():
    assert all((pathlib.Path(__file__).parents[2] / file).exists() for file in FILES)
"""


def test_no_module_of_the_gpus_tests_is_left_out():
    script = (SOURCE / "scripts" / "gpu_check.sh").read_text()
    named = re.search(r"^for name in (.*); do gpu_tests", script, re.MULTILINE)[1].split()
    assert set(named) == {path.stem.removeprefix("test_") for path in (SOURCE / "tests" / "gpu").glob("test_*.py")}


class TestPhases:
    @pytest.mark.slow
    def test_all_but_the_suite_run_in_their_order_and_pass(self, repository):
        status, printed = repository.check()
        assert status == 0, printed
        assert "all passed: once test bench memcheck racecheck initcheck synccheck profile slow" in printed
        summary = (repository.out / "summary.txt").read_text()
        assert "a CPU in its place, commit abc" in summary
        assert "2 of 5 targets met, 0 rows failed" in summary
        steps = re.findall(r"^(\w+): ok", summary, re.MULTILINE)
        checks = ["memcheck", "racecheck", "initcheck", "synccheck"]
        assert steps == ["facts", "build", "once", "test", "bench", *checks, "profile", "slow"]
        for phase in ("once", "test", "bench", *checks, "profile", "slow"):
            assert (repository.out / f"{phase}.log").stat().st_size
        assert "NVIDIA-SMI" in (repository.out / "once.log").read_text()
        # Each test once: `test` leaves out what `once` has passed. Each checker has results of its own.
        passed = repository.results()
        assert {outcome for _, outcome in passed} == {"passed"}
        names = [name for name, _ in passed]
        assert names[:COUNT] == ["test_every_kernel_once"] * COUNT
        assert names[COUNT : 2 * COUNT] == [f"test_{name}" for name in MODULES]
        assert names[2 * COUNT : 6 * COUNT] == ["test_every_kernel_once"] * 4 * COUNT
        assert names[6 * COUNT :] == ["test_large"] * COUNT

    @pytest.mark.slow
    def test_the_suite_runs_where_it_is_named(self, repository):
        (repository.root / "tests" / "test_other.py").write_text("def test_other():\n    pass\n")
        status, printed = repository.check("suite")
        assert status == 0, printed
        assert repository.results() == [("test_other", "passed")]

    def test_the_tests_have_the_documents_that_they_read(self, repository):
        (repository.root / "docs" / "index.md").write_text("text")
        repository.test("int4", READS_FILES)
        status, printed = repository.check("test")
        assert status == 0, printed
        assert ("test_files", "passed") in repository.results()

    @pytest.mark.parametrize("words", [(), ("out", "launch"), ("once",)])
    def test_wrong_arguments(self, words):
        done = subprocess.run(
            [SOURCE / "scripts" / "gpu_check.sh", *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert "phases of: once test bench memcheck" in done.stderr
        assert words != ("out", "launch") or "'launch' is not a phase" in done.stderr
        assert not pathlib.Path("once").exists()


class TestFailures:
    @pytest.mark.slow
    def test_a_failing_test_is_named_and_comes_last_next_time(self, repository):
        repository.test("matmul", "import pytest\n@pytest.mark.gpu\ndef test_wrong():\n    assert not 'broken'\n")
        status, printed = repository.check("test", "bench")
        assert status == 1
        assert "failed: tests/gpu/test_matmul.py::test_wrong" in printed
        assert "FAILED: test\n" in printed
        assert "bench: ok" in printed  # the phases after it run
        repository.test("golden", "import pytest\n@pytest.mark.gpu\ndef test_new():\n    pass\n")
        before = len(repository.results())
        assert repository.check("test")[0] == 1
        assert repository.results()[before:] == [("test_new", "passed"), ("test_wrong", "failed")]

    @pytest.mark.slow
    def test_a_row_that_fails(self, repository):
        status, printed = repository.check("bench", FAULTS="hadamard")
        assert status == 1
        assert re.search(r"hadamard +FAILED: broken", printed)
        assert "FAILED: bench" in printed
        status, printed = repository.check("bench")
        assert status == 0, printed
        log = (repository.out / "bench.log").read_text()
        assert re.findall("measures (.*)", log)[5:] == ["hadamard"]

    def test_no_gpu_ends_the_call_in_its_first_phase(self, repository):
        path = path_without(repository.tools, "nvidia-smi")
        status, printed = repository.check("once", "test", PATH=path, DRY_RUN="")
        assert status == 1
        assert "nvidia-smi is missing: no GPU to build for" in printed
        assert "FAILED: once\n" in printed
        assert not (repository.out / "tests.jsonl").exists()

    @pytest.mark.slow
    def test_tests_that_are_all_skipped_are_a_failure(self, repository):
        for name in MODULES:
            skips = "import pytest\n@pytest.mark.gpu\ndef test_all():\n    pytest.skip('no CUDA device here')\n"
            repository.test(name, skips)
        status, printed = repository.check("test")
        assert status == 1
        assert re.search(r"all skipped: .*no CUDA device here", printed)

    @pytest.mark.slow
    def test_missing_tools_are_reported(self, repository):
        path = path_without(repository.tools, "compute-sanitizer", "ncu")  # and no git
        status, printed = repository.check("once", "memcheck", "bench", "profile", PATH=path, JAXLOWPREC_COMMIT="")
        assert status == 1
        assert "commit unknown: set JAXLOWPREC_COMMIT" in printed
        assert "memcheck: FAILED, compute-sanitizer is not on the PATH: it comes with the CUDA toolkit" in printed
        assert "profile: ncu is not on the PATH: XLA's kernel times instead" in printed
        assert "FAILED: memcheck\n" in printed
        assert "once: ok" in printed
        assert "git is not on the PATH" in (repository.out / "once.log").read_text()
        profiles = json.loads((repository.out / "profiles.json").read_text())["rows"]
        assert [row["by"] for row in profiles] == ["XLA's profiler"] * 3

    @pytest.mark.slow
    def test_what_a_checker_found_is_checked_again(self, repository):
        status, printed = repository.check("memcheck", ERRORS="2")
        assert status == 1
        assert "memcheck: FAILED, it found errors: ========= ERROR SUMMARY: 2 errors" in printed
        status, printed = repository.check("memcheck")
        assert status == 0, printed
        assert "memcheck: ok" in printed
        assert f"{COUNT} passed" in printed


class TestLaterCalls:
    @pytest.mark.slow
    def test_only_what_is_left_runs(self, repository):
        repository.check("test", "bench", ONLY="gemm", PYTEST_ADDOPTS="-k matmul")
        assert repository.results() == [("test_every_kernel_once", "passed"), ("test_matmul", "passed")]
        status, printed = repository.check("test", "bench")
        assert status == 0, printed
        names = [name for name, _ in repository.results()]
        assert len(names) == 2 * COUNT
        assert names.count("test_matmul") == 1
        measured = re.findall("measures (.*)", (repository.out / "bench.log").read_text())
        assert measured == ["gemm", "training", "few rows", "quantize", "hadamard"]
        status, printed = repository.check("test", "bench")
        assert status == 0
        assert "test: ok" in printed
        assert "no test was left to run" in printed
        assert len(repository.results()) == 2 * COUNT

    @pytest.mark.slow
    def test_another_folder_takes_the_results_over(self, repository):
        repository.check("once", "bench")
        first, repository.out = repository.out, repository.out.with_name("second")
        status, printed = repository.check("once", "bench", RESUME=str(first))
        assert status == 0
        assert "no test was left to run" in printed
        assert "measures" not in (repository.out / "bench.log").read_text()
        assert len(repository.results()) == COUNT
        assert "5 of 5 rows" in printed

    @pytest.mark.slow
    def test_another_library_counts_from_the_start(self, repository):
        repository.check("once", "bench")
        (repository.root / "jaxlowprec" / "source.py").write_text("VERSION = 2\n")
        repository.check("once", "bench")
        assert len(repository.results()) == 2 * COUNT
        assert (repository.out / "bench.log").read_text().count("measures") == 10
        assert (repository.out / "gpu-before.json").exists()

    @pytest.mark.slow
    def test_again(self, repository):
        repository.check("once", "bench", "profile")
        repository.check("once", "bench", AGAIN="1")
        assert len(repository.results()) == 2 * COUNT
        assert (repository.out / "bench.log").read_text().count("measures") == 10


SLEEPS = "import time\nimport pytest\n@pytest.mark.gpu\ndef test_sleeps():\n    time.sleep({})\n"


class TestCutOff:
    @pytest.mark.slow
    def test_by_its_own_limit(self, repository):
        repository.test("quantize", SLEEPS.format(3600))
        begun = time.monotonic()
        status, printed = repository.check("test", MINUTES=str(45 / 60))
        assert time.monotonic() - begun < 600
        assert status == 1
        assert "test: CUT OFF" in printed
        assert f"{2 * MODULES.index('quantize')} passed, 1 cut off while they ran" in printed
        assert "cut off: tests/gpu/test_quantize.py::test_sleeps" in printed
        repository.test("quantize", SLEEPS.format(0))
        status, printed = repository.check("test")
        assert status == 0, printed
        names = [name for name, _ in repository.results()]
        assert len(names) == 2 * COUNT - 1
        assert names.count("test_matmul") == 1

    @pytest.mark.slow
    def test_from_outside_leaves_results_and_a_summary(self, repository):
        process = repository.start("bench", SLEEP="3600")
        file = repository.out / "gpu.json"
        wait_for(lambda: file.exists() and "quantize" in file.read_text())
        process.send_signal(signal.SIGTERM)
        printed = process.communicate(timeout=600)[0]
        assert process.returncode == 1
        assert "bench: FAILED, gpu_check.sh was ended from outside" in printed
        assert "bench: FAILED" in (repository.out / "summary.txt").read_text()
        assert [row["case"] for row in repository.rows()] == ["training", "few rows", "quantize"]
        assert repository.rows()[-1]["error"] == "the run ended while this row was measured"
        status, printed = repository.check("bench")
        assert status == 0
        assert "5 of 5 rows" in printed
        assert (repository.out / "bench.log").read_text().count("measures training") == 1

    @pytest.mark.slow
    def test_by_force_leaves_results(self, repository):
        """As where the machine is taken away: no trap runs."""
        repository.test("quantize", SLEEPS.format(3600))
        process = repository.start("test", WORKERS="2")
        file = repository.out / "tests.jsonl"
        wait_for(lambda: file.exists() and "test_sleeps" in file.read_text() and file.read_text().count("passed") >= 4)
        kill_session(process)
        file.write_text(file.read_text() + '{"run": "test, cut o')  # in the middle of a line
        repository.test("quantize", SLEEPS.format(0))
        status, printed = repository.check("test")
        assert status == 0, printed
        lines = [line for line in file.read_text().splitlines() if not line.endswith("cut o")]
        ends = [r["test"] for r in map(json.loads, lines) if r.get("outcome") == "passed"]
        assert len(set(ends)) == 2 * COUNT - 1


class TestBuild:
    """Not a dry run: an interpreter that pretends to install, and a GPU that nvidia-smi pretends to see."""

    @pytest.fixture
    def repository(self, repository):
        program(
            repository.tools,
            "python3",
            f"""
case "$*" in
  *"-m pip install"*)
    echo "$*" >>"$INSTALLED"
    while (($#)); do [[ $1 != --target ]] || mkdir -p "$2/jaxlowprec"; shift; done ;;
  *n.library*) exit 1 ;;
  *n.why_not*) echo "CudaDevice(id=0)" ;;
  *jaxlowprec.cli.main*) echo "says what runs where" ;;
  *) exec {sys.executable} "$@" ;;
esac""",
        )
        return repository

    def installed(self, repository):
        file = repository.out.with_name("installed")
        lines = file.read_text().splitlines() if file.exists() else []
        variables = {"DRY_RUN": "", "PYTHON": str(repository.tools / "python3"), "INSTALLED": str(file)}
        return lines, variables

    @pytest.mark.slow
    def test_once_for_the_same_sources_and_then_from_the_archive(self, repository):
        _, variables = self.installed(repository)
        status, printed = repository.check("once", **variables)
        assert status == 0, printed
        assert "on NVIDIA H200, commit abc" in printed
        lines, _ = self.installed(repository)
        assert len(lines) == 1
        assert "-C cmake.define.JAXLOWPREC_CUDA=ON -C cmake.define.JAXLOWPREC_CUDA_ARCHS=90a" in lines[0]
        assert repository.check("once", **variables)[0] == 0
        assert len(self.installed(repository)[0]) == 1

        shutil.rmtree(repository.root / "build")  # a fresh machine
        first, repository.out = repository.out, repository.out.with_name("second")
        status, printed = repository.check("once", RESUME=str(first), **variables)
        assert status == 0, printed
        assert len(self.installed(repository)[0]) == 1
        assert (repository.root / "build" / "gpu_check" / "site" / "jaxlowprec").is_dir()

        (repository.root / "jaxlowprec" / "source.py").write_text("VERSION = 2\n")
        assert repository.check("once", **variables)[0] == 0
        assert len(self.installed(repository)[0]) == 2

    @pytest.mark.slow
    def test_a_wheel_of_the_same_sources_is_installed_instead(self, repository):
        program(
            repository.tools,
            "python3",
            f"""
case "$*" in
  *"-m pip install"*)
    [[ "$*" == *"--no-index --no-deps --target "*"/site made.whl" ]] || exit 9
    while (($#)); do [[ $1 != --target ]] || cp -r {repository.root}/wheel "$2"; shift; done ;;
  *n.library*) exit 1 ;;
  *n.why_not*) echo "CudaDevice(id=0)" ;;
  *jaxlowprec.cli.main*) echo "says what runs where" ;;
  *) exec {sys.executable} "$@" ;;
esac""",
        )
        shutil.copytree(repository.root / "jaxlowprec", repository.root / "wheel" / "jaxlowprec")
        variables = {"DRY_RUN": "", "PYTHON": str(repository.tools / "python3"), "WHEEL": "made.whl"}
        assert repository.check("once", **variables)[0] == 0
        (repository.root / "jaxlowprec" / "source.py").write_text("VERSION = 2\n")
        status, printed = repository.check("once", **variables)
        assert status == 1
        assert "made.whl has other sources than this tree: build it again" in printed


class TestVisit:
    @pytest.mark.slow
    def test_has_its_four_steps_and_a_later_call_goes_on(self, repository):
        status, printed = repository.check(script="gpu_visit.sh", TOOL="racecheck", FAULTS="gemm")
        assert status == 1
        assert "gpu_visit.sh: 3 of 4 steps passed; failed: bench" in printed
        assert {path.stem for path in repository.out.glob("*.log")} == {"once", "racecheck", "bench", "profile"}
        status, printed = repository.check(script="gpu_visit.sh", TOOL="racecheck")
        assert status == 0, printed
        assert "gpu_visit.sh: 4 of 4 steps passed" in printed
        assert printed.count("no test was left to run") >= 2


READ_DOCUMENTS = (
    "tests/package/test_readme.py",
    "tests/weight_sync/test_documents.py",
    "tests/weight_sync/test_transports_document.py",
    "tests/checkpoints/trees/test_mapping.py",
)


class TestRealTree:
    """The repository's own tests and benchmarks."""

    @pytest.fixture
    def repository(self, repository):
        for folder in ("tests", "benchmarks", "docs", "examples"):
            shutil.rmtree(repository.root / folder)
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(SOURCE / folder, repository.root / folder, ignore=ignored)
        shutil.copy(SOURCE / "README.md", repository.root)
        shutil.rmtree(repository.tools / "python")
        return repository

    def collected(self, repository, *files):
        options = ["--collect-only", "-qq", *files]
        repository.check("suite", PYTEST_ADDOPTS=" ".join(options), PYTHONPATH=str(SOURCE))
        log = (repository.out / "suite.log").read_text()
        assert not re.search("^ERROR|errors? during collection", log, re.MULTILINE), log[-2000:]
        return re.findall(r"^(tests/\S+\.py)::", log, re.MULTILINE)

    @pytest.mark.slow
    def test_tests_that_read_documents_are_collected(self, repository):
        assert set(self.collected(repository, *READ_DOCUMENTS)) == set(READ_DOCUMENTS)

    @pytest.mark.slow
    def test_a_dry_run_of_the_real_tests_and_benchmarks(self, repository):
        """A few tests and rows; a second call has nothing left."""
        few = {"PYTEST_ADDOPTS": "-k 'MXFP4-32x32 and (every_kernel or finite)'", "ONLY": "*Int4*few rows 1x*"}
        phases = ("once", "test", "bench", "memcheck", "profile")
        status, printed = repository.check(*phases, PYTHONPATH=str(SOURCE), **few)
        assert status == 0, printed
        names = [name for name, _ in repository.results()]
        assert names.count("test_every_kernel_once[MXFP4-32x32]") >= 2  # in `once`, and under the checker
        assert {f"test_what_is_not_finite[{bad}-MXFP4-32x32]" for bad in ("nan", "inf", "-inf")} < set(names)
        assert [row["case"] for row in repository.rows()] == ["weight-only Int4, few rows 1x8192x8192"]
        status, printed = repository.check(*phases, PYTHONPATH=str(SOURCE), **few)
        assert status == 0, printed
        assert printed.count("no test was left to run") == 2 * 3  # as it comes, and in the summary
        assert len(repository.results()) == len(names)
