# `make demo` and `make test` do all their own set-up, once, and again when the dependencies change.
#
#   PYTHON=python3.12     the Python that makes the environment (3.11 or newer)
#   VENV=dir              where the environment lives
#   SETUP=no              use the environment in VENV as it is
#   TORCH_ARGS='...'      for pip, for example --index-url with the index that pytorch.org names for
#                         your device; without it pip takes the build that its own index offers
#   WORKERS=0             run the tests in one process, not in two for each core and at most four
#   PYTEST_ARGS='-k queue -x'    DEMO_ARGS='--minutes 1'    BENCH=merge    CHAOS_KILLS=100

PYTHON ?= python3
VENV ?= .venv
SETUP ?= yes
TORCH_ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= auto
DEMO_ARGS ?=
BENCH ?= *
BENCH_ARGS ?=
CHAOS_KILLS ?= 1000
MINUTES ?= 10
FUZZ_ARGS ?=
MODULE ?=
BASE ?=
MUTANTS_ARGS ?=
EXPERIMENT ?= *
LANGUAGE ?=
EXPERIMENT_ARGS ?=

# Tests start hundreds of processes: without compiled modules each costs 0.3 s of CPU more.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
CONSTRAINTS := packaging/constraints.txt
PIP_INSTALL := $(BIN)/python -m pip install --no-input --disable-pip-version-check \
	--progress-bar off --quiet -c $(CONSTRAINTS)
# tests/conftest.py says in which order the files begin
PYTEST = $(BIN)/pytest --numprocesses $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder
CODE := shared coordinator volunteer tests packaging

ifeq ($(SETUP),no)
READY :=
else
READY := $(VENV)/.ready
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup format format-check lint types imports check test test-quick test-changed test-slow test-all demo bench gpu-check chaos fuzz mutants experiments \
	docs constraints release words clean

help: ## say what there is
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1|/' | column -t -s '|'

setup: $(READY) ## make the environment

# torch goes first and alone: resolved together with the rest, pip may pick another build of it and
# fetch gigabytes of GPU libraries. The stamp is written last, so an interrupted set-up starts again.
$(VENV)/.ready: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: $(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.12" >&2; exit 1; }
	@echo "Setting up $(VENV) (once, a few minutes)"
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "make: $(PYTHON) cannot make virtual environments; on Debian: apt install python3-venv" >&2; exit 1; }
	@echo "  torch"
	@$(PIP_INSTALL) $(TORCH_ARGS) torch
	@echo "  everything else"
	@$(PIP_INSTALL) hatchling
	@$(PIP_INSTALL) --no-build-isolation -e '.[dev]'
	@touch $@

format: $(READY) ## write the code in the house's format
	$(BIN)/ruff check --fix-only --quiet $(CODE)
	$(BIN)/ruff format $(CODE)

format-check: $(READY)
	$(BIN)/ruff format --check $(CODE)

lint: $(READY) ## find mistakes
	$(BIN)/ruff check $(CODE)

types: $(READY) ## check types strictly
	$(BIN)/mypy

imports: $(READY) ## check who imports whom
	$(BIN)/lint-imports

check: format-check lint types imports ## everything of `make test` but the tests

# Types and import rules are checked beside the tests, on the core that these leave: they are printed
# where they fail, and otherwise the output ends with pytest's own closing line.
test: $(READY) ## format, lint, types, import rules, the quick tests; of whole programs those nearest to a change
	@$(MAKE) --no-print-directory format-check lint
	@mkdir -p build
	@$(MAKE) --no-print-directory types imports > build/check.log 2>&1 & checks=$$!; \
	  $(MAKE) --no-print-directory test-quick; tests=$$?; \
	  wait $$checks || { cat build/check.log; exit 1; }; exit $$tests

# Tests of whole programs take half the time: where CI is set all run, elsewhere the nearest. With
# arguments of your own, those decide.
test-quick: $(READY) ## the quick tests alone
	@scope="$(if $(CI)$(PYTEST_ARGS),,tests/unit tests/contract tests/tui tests/test_*.py \
	    $$($(BIN)/python -m tests.support.changed --programs $(BASE)))"; \
	  $(PYTEST) -m "not slow" $(PYTEST_ARGS) $$scope

test-changed: $(READY) ## the quick tests nearest to what is changed, by imports; BASE=main since a commit
	@files=$$($(BIN)/python -m tests.support.changed $(BASE)); \
	  if [ -n "$$files" ]; then $(PYTEST) -m "not slow" $(PYTEST_ARGS) $$files; fi

# tests of properties are in both: quickly among the others, with all their examples here
test-slow: $(READY) ## the slow tests: kills, real processes, learning, properties with many examples
	HYPOTHESIS_PROFILE=thorough $(PYTEST) -m "slow or hypothesis" $(PYTEST_ARGS)

test-all: $(READY) ## every test once, the slow ones among the quick
	HYPOTHESIS_PROFILE=thorough $(PYTEST) $(PYTEST_ARGS)

demo: $(READY) ## train a small GPT with two volunteers on this machine
	$(BIN)/coordinator demo $(DEMO_ARGS)

bench: $(READY) ## measure, print tables, write build/bench/*.json
	@mkdir -p build/bench
	@set -e; for file in tests/benchmarks/bench_$(BENCH).py; do \
	  test -e $$file || { echo "make: there is no $$file" >&2; exit 1; }; name=$$(basename $$file .py); echo "== $$name"; \
	  $(BIN)/python -m tests.benchmarks.$$name --json build/bench/$$name.json $(BENCH_ARGS); done

gpu-check: $(READY) ## everything that a volunteer does on the GPU of this machine, as one table; error 75 where there is none
	@mkdir -p build
	@$(BIN)/python -m tests.benchmarks.gpu_check --json build/gpu-check.json $(GPU_ARGS)

chaos: $(READY) ## kill coordinators CHAOS_KILLS times (1000) on each database and check that nothing is lost
	CHAOS_KILLS=$(CHAOS_KILLS) $(BIN)/pytest -m chaos $(PYTEST_ARGS)

fuzz: $(READY) ## send MINUTES (10) of hostile bodies and streams to a coordinator
	$(BIN)/python -m tests.support.fuzz --minutes $(MINUTES) $(FUZZ_ARGS)

mutants: $(READY) ## change the pure rules and see that tests notice; MODULE=plan is one piece
	$(BIN)/python -m tests.support.mutants $(MODULE) $(MUTANTS_ARGS)

experiments: $(READY) ## long learning experiments; go on where they were stopped
	@mkdir -p build/experiments
	@set -e; for file in tests/experiments/exp_$(EXPERIMENT).py; do \
	  test -e $$file || { echo "make: there is no $$file" >&2; exit 1; }; name=$$(basename $$file .py); echo "== $$name"; \
	  PYTHONPATH=. $(BIN)/python $$file --out build/experiments/$$name $(EXPERIMENT_ARGS); done

docs: ## make the site of the documentation in build/site, with search, to be read without a network
	@test -x build/site-env/bin/sphinx-build || { $(PYTHON) -m venv build/site-env && \
	  build/site-env/bin/python -m pip install --quiet --disable-pip-version-check -r packaging/site/requirements.txt; }
	@build/site-env/bin/sphinx-build --quiet --fail-on-warning --keep-going -b html -c packaging/site . build/site
	@echo "build/site/docs/index.html"

constraints: $(READY) ## freeze the versions in VENV into packaging/constraints.txt
	$(BIN)/python packaging/freeze.py > $(CONSTRAINTS).new
	mv $(CONSTRAINTS).new $(CONSTRAINTS)
	@touch $(VENV)/.ready

release: $(READY) ## build wheel, sdist, hashes and bill of materials of this commit in dist/, and try them
	@TORCH_ARGS='$(TORCH_ARGS)' $(BIN)/python packaging/release.py

words: $(READY) ## bring the translations up to date with the code; LANGUAGE=fr begins one
	@$(BIN)/python -m tests.support.words $(LANGUAGE)

clean: ## remove the environment, caches and build output
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
