# Everything sets itself up in .venv; the only needs are Python 3.11 or newer and a C++ compiler.
#   make demo      train the example in bf16 and under the NVFP4 recipe: runs/demo/loss.png, runs/demo/report.json
#   make test      all tests but the slow ones; `make test ARGS=--slow` for those too
#   make test-cpp  the C++ tests, with sanitizers
#   make lint      ruff, mypy, clang-format, docstrings, tables and charts in the documents up to date
#   make docs      the documentation site, strictly: build/site/index.html, which needs no network
#   make wheel     a release's sdist and wheels in dist, checked, and run in empty environments on the oldest and newest JAX
#   make format    what lint wants, where a tool can do it
#   make bench     measure the tables and charts of docs/benchmarks/speed.md anew, on this machine
#   make gpu       for NVIDIA GPUs: JAX with CUDA, a CUDA compiler from PyPI if there is none, and this library's kernels
#   make gpu-check tests, benchmarks, sanitizer and profiles on a GPU, in phases that continue; runs/gpu_check

PYTHON ?= python3
BIN := .venv/bin
ARGS ?=
NATIVE := CMakeLists.txt pyproject.toml $(shell find xla_ffi cmake -type f)
CPP := $(shell find xla_ffi cmake tests benchmarks -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh')
export JAX_PLATFORMS ?= cpu
# Modules are compiled when they are first imported; where nothing may be written, each of the tests' processes does it again.
unexport PYTHONDONTWRITEBYTECODE
# What XLA has compiled once, later tests and processes load.
test: export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/build/jax_cache
test: export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0

.PHONY: demo test test-cpp lint docs format wheel bench gpu gpu-check clean

demo: .venv/installed
	$(BIN)/python examples/train_lm.py --recipe bf16,nvfp4 --steps 400 --out runs/demo --resume $(ARGS)

# Neighbouring tests share compiled functions: each process takes one half of them, then from the other's rest.
test: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

test-cpp: .venv/installed
	scripts/test_cpp.sh

lint: .venv/linters
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python scripts/check_docstrings.py
	$(BIN)/mypy
	@$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/python benchmarks/tables.py --check

docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: .venv/linters
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CPP)
	$(BIN)/python benchmarks/tables.py
	$(BIN)/python scripts/site/names.py

wheel:
	scripts/build_wheel.sh $(PYTHON)

bench: .venv/installed
	$(BIN)/python benchmarks/cpu_kernels.py --save
	$(BIN)/python benchmarks/formats.py --save
	$(BIN)/python benchmarks/weight_only_matmul.py --save
	$(BIN)/python benchmarks/grouped_matmul.py --save
	$(BIN)/python benchmarks/weight_sync.py --save
	$(BIN)/python benchmarks/weight_sync_tcp.py --save
	$(BIN)/python benchmarks/scaling.py --save
	$(BIN)/python benchmarks/train_step.py --save
	$(BIN)/python benchmarks/telemetry.py --save
	$(BIN)/python benchmarks/tables.py

gpu:
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	PYTHON=$(BIN)/python scripts/install_gpu.sh

gpu-check:
	env -u JAX_PLATFORMS scripts/gpu_check.sh runs/gpu_check

# Bytecode is made of what is imported, when it is: of all that is installed, twice for what the build needs as well, it takes a
# third of pip's time.
.venv/installed .venv/linters .venv/docs: export PIP_COMPILE ?= 0

.venv/installed: $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing JAX and compiling the kernels: two to three minutes on two cores"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

.venv/linters: .venv/installed
	$(BIN)/python scripts/extras.py dev | xargs $(BIN)/python -m pip install --quiet --disable-pip-version-check
	touch $@

# Docstrings are read, not imported: the site needs neither JAX nor the kernels.
.venv/docs: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python scripts/extras.py docs | xargs $(BIN)/python -m pip install --quiet --disable-pip-version-check
	touch $@

clean:
	rm -rf .venv build dist runs
