# kapelle: `make demo` trains a team on this machine, `make test` proves the library, `make help` lists the rest.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

# Arguments for `kapelle demo`, for example ARGS="training.steps=20".
ARGS ?=
# Another package index for torch alone, for example https://download.pytorch.org/whl/cpu on Linux
# without an NVIDIA GPU (the default wheel there brings several GB of CUDA).
TORCH_INDEX ?=

# One pin, one place: the version of torch is read from the constraints.
TORCH := $(shell grep '^torch==' constraints.txt)
# A foreign index holds torch's dependencies in its own versions; the second install puts ours right.
TORCH_SOURCE := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX),-c constraints.txt)

# vLLM's CPU build and what it pins.
VLLM_VENV := .venv-vllm

# The core's dependencies, without an extra.
CORE_VENV := .venv-core

# Real packages of others, which disagree with kapelle's other extras.
APPS_VENV := .venv-apps
# The frameworks of programs that exist; kapelle itself is not installed there.
PROGRAMS_VENV := .venv-programs

# Idle threads of torch must not spin: beside another busy process that costs ten times the work itself.
export OMP_WAIT_POLICY ?= PASSIVE

# Python keeps what it has compiled, whatever the shell says: hundreds of processes here import the same sources.
unexport PYTHONDONTWRITEBYTECODE

# `make test` without what takes longer.
QUICK := not slow and not sandbox_full and not vllm and not ranks and not models and not types and not apps and not long

# How the suite is shared out: one process more than cores (tests/conftest.py), and who has nothing left takes over.
PARALLEL := -n auto --dist worksteal

.DEFAULT_GOAL := help
.PHONY: demo real test test-fast test-core test-real test-long test-sandbox test-vllm test-apps test-ranks test-types test-models test-kernels test-processors test-oldest test-faults claims check format docs wheel clean help

demo: $(STAMPS)/kapelle ## train a two-agent team on this machine's CPU and show what it learned
	@$(BIN)/kapelle demo $(ARGS)

test: $(STAMPS)/test ## run the test suite (TESTS=tests/functional runs a part of it)
	@$(BIN)/python -m pytest $(or $(TESTS),$(PARALLEL))

test-fast: $(STAMPS)/test ## run the quick tests of the files in tests/fast_*.txt (a minute on two cores)
	@$(BIN)/python -m pytest $(PARALLEL) -m "$(QUICK)" $(or $(TESTS),@tests/fast_core.txt @tests/fast_rest.txt)

test-core: $(CORE_VENV)/.ready ## run the quick tests of tests/fast_core.txt with the core's dependencies alone
	@$(CORE_VENV)/bin/python -m pytest $(PARALLEL) -m "$(QUICK)" $(or $(TESTS),@tests/fast_core.txt)

test-long: $(STAMPS)/test ## run what takes long, and the cases of which `make test` takes a sample (40 minutes on two cores)
	@$(BIN)/python -m pytest $(PARALLEL) -m "long and not vllm and not ranks and not models and not apps" $(TESTS)

test-sandbox: $(STAMPS)/test ## run every hostile program and every honest solution (minutes; the suite takes a sample)
	@$(BIN)/python -m pytest -m "not vllm" tests/environments/sandbox tests/environments/grading tests/environments

test-vllm: $(VLLM_VENV)/.ready ## ask vLLM's CPU build what every engine is asked, in an environment of its own (minutes)
	@$(VLLM_VENV)/bin/python -m pytest -m vllm -W ignore $(or $(TESTS),tests/engines/rollout)

test-apps: $(APPS_VENV)/.ready $(PROGRAMS_VENV)/.ready ## play worlds (verifiers, OpenEnv, inspect_ai) and train programs (LangGraph, OpenAI's Agents SDK, …) with the real packages, in environments of their own (minutes)
	@KAPELLE_APPS_PYTHON=$(CURDIR)/$(PROGRAMS_VENV)/bin/python $(APPS_VENV)/bin/python -m pytest -m apps -W ignore $(or $(TESTS),tests/apps)
	@$(APPS_VENV)/verifiers/bin/python -m pytest -m apps -W ignore tests/apps/test_verifiers.py tests/apps/test_learning.py

test-ranks: $(STAMPS)/test ## train every algorithm in two, three and four processes, on a GPU's twin too, and kill some (minutes)
	@$(BIN)/python -m pytest -m ranks $(or $(TESTS),tests/training tests/cli tests/twin)

test-types: $(STAMPS)/test $(STAMPS)/types ## let mypy and pyright read README, pages and examples, without a plugin (minutes; seconds the second time)
	@$(BIN)/python -m pytest -m types $(or $(TESTS),tests/repository)

test-models: $(STAMPS)/test ## train a model of every family, here and on a GPU's twin, and compare with what `kapelle validate` says (minutes)
	@$(BIN)/python -m pytest -m models $(or $(TESTS),tests/cli tests/twin)

real: $(STAMPS)/test ## train a team of two on a published model of 270M parameters (fetches 240 MB; 15 minutes on two cores)
	@$(BIN)/python examples/real/prepare.py
	@$(BIN)/kapelle train examples/real/team.yaml $(ARGS)

test-real: $(STAMPS)/test ## compare that model with transformers and PEFT, kill, export and serve it (minutes)
	@$(BIN)/python examples/real/prepare.py
	@$(BIN)/python -m pytest -m real $(or $(TESTS),tests/real)

TRITON := triton==3.7.0

build/triton: $(BIN)/python
	@$(PIP) install --no-deps --target $@ $(TRITON)

test-kernels: build/triton $(STAMPS)/test ## run our own kernels for GPUs in Triton's interpreter (Linux; fetches Triton, 200 MB)
	@PYTHONPATH=build/triton $(BIN)/python -m pytest $(or $(TESTS),tests/models/fast/test_triton_products.py)

# Tests whose numbers hang on the order in which a processor's kernels add up.
SUMS := tests/engines/train/test_parity.py tests/engines/train/torch/test_out_of_memory.py tests/algorithms/test_update_by_hand.py

test-processors: $(STAMPS)/test ## run some numeric tests with the kernels of other processors, and with two threads (a minute)
	@OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41 $(BIN)/python -m pytest -q -m "not slow and not long" $(or $(TESTS),$(SUMS))
	@OMP_NUM_THREADS=2 ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 $(BIN)/python -m pytest -q -m "not slow and not long" $(or $(TESTS),$(SUMS))

test-oldest: $(BIN)/python ## run what is quick with the oldest versions that pyproject.toml allows (minutes, and GBs of CUDA)
	@$(BIN)/python tools/try_oldest.py $(TESTS)

claims: $(STAMPS)/test ## run two seeds of ten cheap claims of docs/claims.md; fails if a verdict turns (minutes)
	@$(BIN)/python -m experiments run quick --jobs 2

test-faults: $(STAMPS)/test ## break everything around runs: kills, disks, bits, worlds (20 minutes; ARGS="--only kills")
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

format: $(STAMPS)/dev ## rewrite the code in the project's format, with lint fixes that are safe
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs: $(STAMPS)/docs ## check links, run the tutorials and how-tos, build the site of the documentation in build/site
	@echo "== links of the pages"
	@$(BIN)/python tools/check_links.py
	@echo "== how-to pages"
	@$(BIN)/python -m tools.docs_site.howto
	@echo "== site, with the tutorials' outputs (mkdocs --strict)"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "== links of the site"
	@$(BIN)/python -m tools.docs_site.check build/site
	@echo "== what readers search for (needs node)"
	@if command -v node >/dev/null; then node tools/docs_site/search.js build/site; else echo "left out: there is no node"; fi

wheel: $(BIN)/python ## build the wheel and use it in an environment of its own, without this checkout (minutes)
	@$(BIN)/python tools/try_wheel.py $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))

clean: ## remove the environment and build output; runs/ stays
	rm -rf $(VENV) $(CORE_VENV) $(VLLM_VENV) $(APPS_VENV) $(PROGRAMS_VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests examples tools -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | awk -F '\t' '{printf "  make %-12s %s\n", $$1, $$2}'

# Stamps: an install runs again only when what it depends on has changed.
$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "There is no '$(PYTHON)' here. Install Python >= 3.11, or name it: make $(MAKECMDGOALS) PYTHON=…" >&2; \
	  exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "kapelle needs Python >= 3.11; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name a newer one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
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
	@echo "installing what the tests need (once) ..." >&2
	@$(PIP) install -c constraints.txt -e '.[test]'
	@touch $@

$(STAMPS)/docs: $(STAMPS)/kapelle
	@echo "installing what the documentation needs (once) ..." >&2
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
	@echo "installing the packages whose worlds are played (once, 4 GB with a CPU build of torch) ..." >&2
	@$(PYTHON) -m venv $(APPS_VENV)
	@$(PYTHON) tools/apps_environment.py $(APPS_VENV) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@touch $@

$(PROGRAMS_VENV)/.ready: tests/apps/requirements.txt
	@echo "installing the frameworks of programs that exist (once, 750 MB) ..." >&2
	@$(PYTHON) -m venv $(PROGRAMS_VENV)
	@$(PROGRAMS_VENV)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps -r tests/apps/requirements.txt
	@touch $@

$(STAMPS)/types: $(STAMPS)/dev
	@echo "installing pyright (once, 100 MB) ..." >&2
	@$(PIP) install -c constraints.txt basedpyright
	@touch $@

$(STAMPS)/dev: $(STAMPS)/kapelle
	@echo "installing what the checks need (once) ..." >&2
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@
