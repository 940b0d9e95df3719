# kapelle: `make demo` trains a team on this machine, `make test` runs the tests, and `make help` lists all targets.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

# Arguments for `kapelle demo`, for example ARGS="training.steps=20".
ARGS ?=
# The data type of `make real`: without instructions for bfloat16 (on x86, AVX-512), a processor computes faster in float32.
REAL_DTYPE = $(if $(shell grep -m1 -owE 'avx512bw|bf16' /proc/cpuinfo 2>/dev/null),,model.dtype=float32)
# Another package index only for torch, for example https://download.pytorch.org/whl/cpu on Linux
# without an NVIDIA GPU (where the default wheel would download several GB of CUDA).
TORCH_INDEX ?=

# The version of torch is pinned only in constraints.txt.
TORCH := $(shell grep '^torch==' constraints.txt)
# Another index has its own versions of torch's dependencies; the second install corrects them.
TORCH_SOURCE := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX),-c constraints.txt)

# vLLM's CPU build and the versions that it pins.
VLLM_VENV := .venv-vllm

# The core's dependencies, without extras.
CORE_VENV := .venv-core

# Third-party packages that conflict with kapelle's other extras.
APPS_VENV := .venv-apps
# Frameworks of external programs; kapelle itself is not installed there.
PROGRAMS_VENV := .venv-programs

# Idle threads of torch must not spin: with another busy process, spinning takes ten times the time of the work.
export OMP_WAIT_POLICY ?= PASSIVE

# Let Python keep compiled files, whatever the shell sets, because hundreds of processes import the same sources.
unexport PYTHONDONTWRITEBYTECODE

# `make test` without the tests that take longer.
QUICK := not slow and not sandbox_full and not vllm and not ranks and not models and not types and not apps and not long

# How the tests are distributed: one process more than cores (tests/conftest.py), and idle processes take over tests.
PARALLEL := -n auto --dist worksteal

.DEFAULT_GOAL := help
.PHONY: demo real test test-fast test-core test-real test-long test-sandbox test-vllm test-apps test-ranks test-types test-models test-kernels test-processors test-oldest test-faults claims check format docs wheel clean help

demo: $(STAMPS)/kapelle ## train a two-agent team on this machine's CPU and show what it learned
	@$(BIN)/kapelle demo $(ARGS)

test: $(STAMPS)/test ## run the test suite (TESTS=tests/functional runs a part of it)
	@$(BIN)/python -m pytest $(or $(TESTS),$(PARALLEL))

test-fast: $(STAMPS)/test ## run the quick tests of the files in tests/fast_*.txt (a minute on two cores)
	@$(BIN)/python -m pytest $(PARALLEL) -m "$(QUICK)" $(or $(TESTS),@tests/fast_core.txt @tests/fast_rest.txt)

test-core: $(CORE_VENV)/.ready ## run the quick tests of tests/fast_core.txt with only the core's dependencies
	@$(CORE_VENV)/bin/python -m pytest $(PARALLEL) -m "$(QUICK)" $(or $(TESTS),@tests/fast_core.txt)

test-long: $(STAMPS)/test ## run the long tests, and all cases of which `make test` runs a sample (40 minutes on two cores)
	@$(BIN)/python -m pytest $(PARALLEL) -m "long and not vllm and not ranks and not models and not apps" $(TESTS)

test-sandbox: $(STAMPS)/test ## run every hostile program and every honest solution (minutes; `make test` runs a sample)
	@$(BIN)/python -m pytest -m "not vllm" tests/environments/sandbox tests/environments/grading tests/environments

test-vllm: $(VLLM_VENV)/.ready ## run the engine tests with vLLM's CPU build, in a separate environment (minutes)
	@$(VLLM_VENV)/bin/python -m pytest -m vllm -W ignore $(or $(TESTS),tests/engines/rollout)

test-apps: $(APPS_VENV)/.ready $(PROGRAMS_VENV)/.ready ## test environments (verifiers, OpenEnv, inspect_ai) and train programs (LangGraph, OpenAI's Agents SDK, …) with the real packages, in separate environments (minutes)
	@KAPELLE_APPS_PYTHON=$(CURDIR)/$(PROGRAMS_VENV)/bin/python KAPELLE_VERIFIERS_PYTHON=$(CURDIR)/$(APPS_VENV)/verifiers-v1/bin/python $(APPS_VENV)/bin/python -m pytest -m apps -W ignore $(or $(TESTS),tests/apps)
	@$(APPS_VENV)/verifiers/bin/python -m pytest -m apps -W ignore tests/apps/test_verifiers.py tests/apps/test_learning.py

test-ranks: $(STAMPS)/test ## train every algorithm in two, three and four processes, also on the emulated GPU, and kill some processes (minutes)
	@$(BIN)/python -m pytest -m ranks $(or $(TESTS),tests/training tests/cli tests/twin)

test-types: $(STAMPS)/test $(STAMPS)/types ## check the types of README, pages and examples with mypy and pyright, without a plugin (minutes; seconds the second time)
	@$(BIN)/python -m pytest -m types $(or $(TESTS),tests/repository)

test-models: $(STAMPS)/test ## train a model of every family, here and on the emulated GPU, and compare with the result of `kapelle validate` (minutes)
	@$(BIN)/python -m pytest -m models $(or $(TESTS),tests/cli tests/twin)

real: $(STAMPS)/test ## train a team of two agents on a published model of 270M parameters (downloads 240 MB; 15 minutes)
	@$(BIN)/python examples/real/prepare.py
	@$(BIN)/kapelle train examples/real/team.yaml $(REAL_DTYPE) $(ARGS)

test-real: $(STAMPS)/test ## compare the model of `make real` with transformers and PEFT, and kill, export and serve its run (minutes)
	@$(BIN)/python examples/real/prepare.py
	@$(BIN)/python -m pytest -m real $(or $(TESTS),tests/real)

TRITON := triton==3.7.0

build/triton: $(BIN)/python
	@$(PIP) install --no-deps --target $@ $(TRITON)

test-kernels: build/triton $(STAMPS)/test ## run our own GPU kernels in Triton's interpreter, and compile them for GPUs (Linux; downloads Triton, 200 MB)
	@PYTHONPATH=build/triton $(BIN)/python -m pytest -m "" $(or $(TESTS),tests/models/fast/test_triton_products.py tests/models/fast/test_decode_kernels.py)

# Tests whose numbers depend on the order in which a processor's kernels sum.
SUMS := tests/engines/train/test_parity.py tests/engines/train/torch/test_out_of_memory.py tests/algorithms/test_update_by_hand.py

test-processors: $(STAMPS)/test ## run some numeric tests with the kernels of other processors, and with two threads (a minute)
	@OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41 $(BIN)/python -m pytest -q -m "not slow and not long" $(or $(TESTS),$(SUMS))
	@OMP_NUM_THREADS=2 ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 $(BIN)/python -m pytest -q -m "not slow and not long" $(or $(TESTS),$(SUMS))

test-oldest: $(BIN)/python ## run the quick tests with the oldest versions that pyproject.toml allows (minutes, and GBs of CUDA)
	@$(BIN)/python tools/try_oldest.py $(TESTS)

claims: $(STAMPS)/test ## run two seeds of ten cheap claims of docs/claims.md; fails if a verdict changes (minutes)
	@$(BIN)/python -m experiments run quick --jobs 2

test-faults: $(STAMPS)/test ## inject faults into runs: kills, disk errors, flipped bits, faulty environments (20 minutes; ARGS="--only kills")
	@$(BIN)/python -m tests.faults --page docs/faults.md $(ARGS)

check: $(STAMPS)/test $(STAMPS)/dev ## format, lint, types and layers; changes nothing
	@echo "== format (ruff format --check)"
	@$(BIN)/ruff format --check .
	@echo "== lint (ruff check)"
	@$(BIN)/ruff check .
	@echo "== types (mypy --strict)"
	@$(BIN)/mypy
	@echo "== layers (import-linter)"
	@$(BIN)/lint-imports --no-logo

format: $(STAMPS)/dev ## rewrite the code in the project's format, with safe lint fixes
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs: $(STAMPS)/docs ## check links, run the tutorials and how-tos, and build the documentation site in build/site
	@echo "== links of the pages"
	@$(BIN)/python tools/check_links.py
	@echo "== how-to pages"
	@$(BIN)/python -m tools.docs_site.howto
	@echo "== site, with the tutorials' outputs (mkdocs --strict)"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "== links of the site"
	@$(BIN)/python -m tools.docs_site.check build/site
	@echo "== what readers search for (needs node)"
	@if command -v node >/dev/null; then node tools/docs_site/search.js build/site; else echo "skipped: node is not installed"; fi

wheel: $(BIN)/python ## build the wheel and use it in a separate environment, without this checkout (minutes)
	@$(BIN)/python tools/try_wheel.py $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))

clean: ## remove the environment and build output, but keep runs/
	rm -rf $(VENV) $(CORE_VENV) $(VLLM_VENV) $(APPS_VENV) $(PROGRAMS_VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests examples tools -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## print this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | awk -F '\t' '{printf "  make %-12s %s\n", $$1, $$2}'

# Stamps: an install runs again only if its dependencies have changed.
$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "'$(PYTHON)' was not found. Install Python >= 3.11, or give its name: make $(MAKECMDGOALS) PYTHON=…" >&2; \
	  exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "kapelle needs Python >= 3.11; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Use a newer version: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; \
	  rm -rf $(VENV); exit 2; }

$(STAMPS)/torch: constraints.txt | $(BIN)/python
	@echo "installing $(TORCH) (once) ..." >&2
	@$(PIP) install $(TORCH_SOURCE) '$(TORCH)'
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/kapelle: pyproject.toml constraints.txt $(STAMPS)/torch
	@echo "installing kapelle (once) ..." >&2
	@$(PIP) install -c constraints.txt -e '.[viewer]'
	@touch $@

$(STAMPS)/test: $(STAMPS)/kapelle
	@echo "installing the tests' dependencies (once) ..." >&2
	@$(PIP) install -c constraints.txt -e '.[test]'
	@touch $@

$(STAMPS)/docs: $(STAMPS)/kapelle
	@echo "installing the documentation's dependencies (once) ..." >&2
	@$(PIP) install -c constraints.txt -e '.[docs]'
	@touch $@

$(CORE_VENV)/.ready: pyproject.toml constraints.txt
	@echo "installing kapelle without its extras (once) ..." >&2
	@$(PYTHON) -m venv $(CORE_VENV)
	@$(CORE_VENV)/bin/python -m pip --disable-pip-version-check --quiet install $(TORCH_SOURCE) '$(TORCH)'
	@$(CORE_VENV)/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt -e . hypothesis pytest pytest-asyncio pytest-xdist
	@touch $@

$(VLLM_VENV)/.ready: tools/vllm_environment.py constraints.txt
	@echo "installing vLLM's CPU build (once, 1 GB) ..." >&2
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(PYTHON) tools/vllm_environment.py $(VLLM_VENV) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@touch $@

$(APPS_VENV)/.ready: tools/apps_environment.py constraints.txt pyproject.toml
	@echo "installing the packages of the tested environments (once, 4 GB with a CPU build of torch) ..." >&2
	@$(PYTHON) -m venv $(APPS_VENV)
	@$(PYTHON) tools/apps_environment.py $(APPS_VENV) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@touch $@

$(PROGRAMS_VENV)/.ready: tests/apps/requirements.txt
	@echo "installing the frameworks of external programs (once, 750 MB) ..." >&2
	@$(PYTHON) -m venv $(PROGRAMS_VENV)
	@$(PROGRAMS_VENV)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps -r tests/apps/requirements.txt
	@touch $@

$(STAMPS)/types: $(STAMPS)/dev
	@echo "installing pyright (once, 100 MB) ..." >&2
	@$(PIP) install -c constraints.txt basedpyright
	@touch $@

$(STAMPS)/dev: $(STAMPS)/kapelle
	@echo "installing the checks' dependencies (once) ..." >&2
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@
