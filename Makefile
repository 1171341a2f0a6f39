# serve · test · bench · lint: each sets up what it needs in .venv, so a fresh clone needs one command.
PYTHON ?= python3
PORT   ?= 8080
# Processes that share the test files; each may start an engine of two threads.
WORKERS ?= 2
VENV   := .venv
BIN    := $(VENV)/bin
PACK   := demo/strata-demo-q4_0.gguf
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help serve test bench lint docs format soak gpu-test clean

help:
	@echo "make serve    start the server on http://127.0.0.1:$(PORT) with the demo model"
	@echo "make test     every test that needs no graphics card (some ten minutes on 2 cores)"
	@echo "make bench    measure the engine on this machine with the demo model"
	@echo "make lint     ruff, mypy, import-linter"
	@echo "make format   what ruff can put right"
	@echo "make soak     the long runs: fuzzing and load for minutes"
	@echo "make gpu-test the tests that need a graphics card"
	@echo "make docs     write the generated pages of docs/ again"
	@echo "make clean    remove .venv and all that was built"

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Strata needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet --editable .
	@touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet --editable '.[test]'
	@touch $@ $(VENV)/.base

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet --editable '.[dev]'
	@mkdir -p $(VENV)/typing && ln -sfn $(CURDIR) $(VENV)/typing/strata
	@touch $@ $(VENV)/.test $(VENV)/.base

serve: $(VENV)/.base
	@exec $(BIN)/strata-server --config configs/strata-demo.json --port $(PORT)

# Some hundred processes are started: their modules are compiled once.
test: $(VENV)/.test
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not gpu and not soak"

soak: $(VENV)/.test
	$(BIN)/pytest -m "soak and not gpu"

gpu-test: $(VENV)/.test
	$(BIN)/python -m strata.bench.gpu_tests --json build/gpu-tests.json --log build/gpu-tests.log

bench: $(VENV)/.base
	$(BIN)/strata-bench engine --pack $(PACK)

# The symlink gives the checkers a folder named `strata`; at run time the editable install maps the names.
lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=$(VENV)/typing $(BIN)/mypy -p strata.protocol -p strata.kernels -p strata.engine -p strata.server -p strata.bench
	PYTHONPATH=$(VENV)/typing $(BIN)/lint-imports

docs: $(VENV)/.base
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/distances.py
	$(BIN)/strata-bench page

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
