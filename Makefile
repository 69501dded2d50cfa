# Everything a checkout needs:
#   make demo    real daemons, real clients, and swaps that no request notices
#   make test    all tests, as CI runs them
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
BUILD  := build
MODEL  ?= auto

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup models demo lint format test test-native test-python bench lock clean

help:            ## show this list
	@awk -F ':[^#]*## ' '/^[a-z-]+:[^#]*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- set-up: a virtual environment from the lock file, then this package with its native part ------

NATIVE := $(shell find native -type f 2>/dev/null)

$(BIN)/.created:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(BIN)/.locked: requirements-dev.lock $(BIN)/.created
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.lock
	touch $@

# Editable: Python sources are used in place, the extension is built again when its sources change.
$(BIN)/.installed: pyproject.toml LICENSE README.md $(NATIVE) $(BIN)/.locked
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

setup: $(BIN)/.installed   ## make .venv with everything (does nothing when it is up to date)

models: setup    ## download and convert the demo's model, derive its versions (MODEL=real|tiny|auto)
	$(BIN)/python -m demo.models --build $(BUILD) --model $(MODEL)

# --- to look at -----------------------------------------------------------------------------------

demo: setup      ## swap weights under traffic and check every answer (report: build/demo-report.json)
	$(BIN)/python -m demo --build $(BUILD) --model $(MODEL)

bench: setup     ## measure the native core and the engine on this machine (results: build/bench)
	mkdir -p $(BUILD)/bench
	$(BIN)/python -m tests.bench.native --json $(BUILD)/bench/native.json
	root=$$($(BIN)/python -m demo.models --build $(BUILD) --model $(MODEL)) && \
	    $(BIN)/python -m tests.bench.engine $$root/smollm2-v1 --json $(BUILD)/bench/engine.json

# --- checks ---------------------------------------------------------------------------------------

# In this order, so that the last line of `make test` is pytest's summary.
test: setup      ## lint, native tests under sanitizers, then all Python tests
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory test-native
	@$(MAKE) --no-print-directory test-python

lint: setup      ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup    ## rewrite the sources as ruff would have them
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format --quiet .

test-native: setup   ## the native core under ThreadSanitizer and AddressSanitizer
	PATH="$(abspath $(BIN)):$$PATH" tests/stress/run.sh

test-python: setup   ## pytest, on the real model where it can be had (ARGS='-k pattern' chooses)
	@$(BIN)/python -m demo.models --build $(BUILD) --model $(MODEL) --source-only
	@if [ -f $(BUILD)/models/f32/config.json ]; then \
	    export CHANGEOVER_TEST_MODEL_F32=$(abspath $(BUILD))/models/f32; \
	    export CHANGEOVER_TEST_MODEL_BF16=$(abspath $(BUILD))/models/bf16; \
	fi; $(BIN)/python -m pytest $(ARGS)

# --- upkeep ---------------------------------------------------------------------------------------

lock:            ## write requirements-dev.lock from what is newest now
	.ci/lock $(PYTHON) > requirements-dev.lock.new
	mv requirements-dev.lock.new requirements-dev.lock

clean:           ## remove everything that make made
	rm -rf $(VENV) $(BUILD) .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
