# make demo   the main job on a small file, from nothing but Python 3.11, pip and make
# make test   lint, import rules, types, tests and all notebooks
# make test-slow   all tests, the slow ones too, and more examples of every law
# make test-ucx   the batch and service tests over UCX, with UCXX and the Dask that it pins
# The virtual environment is made once and again when pyproject.toml changes.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
UCX_VENV ?= .venv-ucx
UCXX ?= distributed-ucxx-cu12==0.52.* ucxx-cu12==0.52.* libucx-cu12==1.21.* rmm-cu12==26.10.*
UCX_PIP := $(UCX_VENV)/bin/python -m pip --disable-pip-version-check --quiet
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test test-slow test-ucx clean

demo: $(VENV)/.engine
	$(BIN)/daskserve fetch-model
	$(BIN)/daskserve run-batch -i examples/prompts.jsonl -o out/demo.jsonl --max-tokens 64 --restart
	@echo "Answers in out/demo.jsonl; the first two:"
	@head -n 2 out/demo.jsonl

test: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/pytest -q -n 2 --dist worksteal
	$(BIN)/pytest -q --timeout=600 --nbmake notebooks

test-slow: $(VENV)/.dev
	DASKSERVE_HYPOTHESIS=thorough $(BIN)/pytest -q -m "not gpu"

# On CPUs too: UCX_TLS=... keeps it to TCP and shared memory.
test-ucx:
	test -x $(UCX_VENV)/bin/python || $(PYTHON) -m venv $(UCX_VENV)
	$(UCX_PIP) install $(TORCH)
	$(UCX_PIP) install --editable ".[dev]"
	if $(UCX_PIP) install $(UCXX); then \
	  UCX_TLS=tcp,shm,self UCXPY_CONNECT_TIMEOUT=60 DASK_DASKSERVE__SERVICE__PROTOCOL=ucx \
	    $(UCX_VENV)/bin/pytest -q -m "not gpu" tests/batch; \
	else echo "skipped: the packages of UCXX cannot be had here ($(UCXX))"; fi

# TORCH stands unquoted so that it may hold pip options, such as another index.
$(VENV)/.engine: pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing PyTorch and the engine: some minutes, silently"
	$(PIP) install $(TORCH)
	$(PIP) install --editable ".[engine]"
	touch $@

$(VENV)/.dev: $(VENV)/.engine
	$(PIP) install --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) $(UCX_VENV) out .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
