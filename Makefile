# Everything happens in .venv, which is made on first use and brought up to date when pyproject.toml changes.

PYTHON ?= python3
ARGS ?=

VENV := .venv
RUN := $(VENV)/bin/python
PIP_INSTALL := $(RUN) -m pip install -qq --disable-pip-version-check --editable

.PHONY: help
help: ## List these targets
	@echo "Usage: make TARGET [PYTHON=python3] [ARGS=…]"
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-10s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(VENV)/package ## See a workflow survive a crash
	@$(RUN) -m romancy demo $(ARGS)

.PHONY: test
test: lint ## Check everything, on real SQLite, PostgreSQL, MariaDB and MySQL; ARGS go to pytest
	@$(RUN) -m pytest -n 3 --dist loadfile $(ARGS)

.PHONY: lint
lint: $(VENV)/development ## Check style and types
	@$(RUN) -m ruff check --quiet .
	@$(RUN) -m ruff format --quiet --check . || { echo "hint: make format" >&2; exit 1; }
	@$(RUN) -m mypy --no-error-summary

.PHONY: format
format: $(VENV)/development ## Put the code into shape
	@$(RUN) -m ruff check --quiet --fix-only .
	@$(RUN) -m ruff format --quiet .

.PHONY: servers
servers: $(VENV)/development ## Keep the test servers running, for many quick runs of pytest
	@$(RUN) -m tests.servers $(ARGS)

.PHONY: bench
bench: $(VENV)/development ## Measure beside bare drivers and other libraries; ARGS="--quick --databases postgres"
	@$(RUN) -m benchmarks $(ARGS)

.PHONY: chaos
chaos: $(VENV)/development ## Ten minutes of killed workers and restarted databases; ARGS="--database postgres --seed 1"
	@$(RUN) -m tests.chaos $(ARGS)

.PHONY: crashes
crashes: $(VENV)/development ## Let workflows die at every durable write, not only at some; ARGS go to pytest
	@ROMANCY_EVERY_CRASH_POINT=1 $(RUN) -m pytest -n 3 tests/engine/test_crash_points.py $(ARGS)

.PHONY: clean
clean: ## Remove what was made here
	@rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	@find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/package: pyproject.toml | $(VENV)/bin/pip
	@echo "Installing romancy into $(VENV)"
	@$(PIP_INSTALL) .
	@touch $@

$(VENV)/development: pyproject.toml | $(VENV)/bin/pip
	@echo "Installing romancy and its development tools into $(VENV)"
	@$(PIP_INSTALL) '.[dev,postgres,mysql]'
	@touch $@

# Debian's python3 comes without ensurepip, which is in python3-venv; then any pip it has can put one into the venv.
$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "error: $(PYTHON) is not Python 3.11 or later" >&2; \
	     echo "hint: make PYTHON=… names another one" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 \
	|| { $(PYTHON) -m venv --clear --without-pip $(VENV) \
	     && $(PYTHON) -m pip -qq --python $(RUN) install pip; } \
	|| { echo "error: $(PYTHON) has neither ensurepip nor pip" >&2; \
	     echo "hint: apt-get install python3-venv" >&2; rm -rf $(VENV); exit 1; }
