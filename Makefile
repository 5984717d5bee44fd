# `make test` and `make demo` share one virtual environment, set up once; remove it with `make clean`.
VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
# Run the candidate: a version manager's shim may exist without a version behind it.
PYTHON ?= $(shell if python3.11 -c '' >/dev/null 2>&1; then echo python3.11; else echo python3; fi)
# More arguments for pip (an index of CPU builds, say) and for pytest (`make test ARGS='-m "not slow"'`).
PIP_ARGS ?=
ARGS ?=
OUT ?= demo

.DEFAULT_GOAL := help
.PHONY: help demo test check static bench golden docs clean

help: ## Show the targets.
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMP) ## Plan, explain and run a small model on CPU processes; results in ./demo.
	$(BIN)/partita demo --out $(OUT)

test: $(STAMP) ## Run all tests.
	$(BIN)/python -m pytest $(ARGS)

check: static ## Lint, format, types, layers, and the tiny end-to-end test; what pre-commit runs.
	$(BIN)/python -m pytest tests/test_tiny.py

static: $(STAMP) ## The part of `check` that runs no code.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports --no-logo

bench: $(STAMP) ## Run the benchmarks and print their tables.
	$(BIN)/python benchmarks/emulated.py $(ARGS)
	$(BIN)/python benchmarks/capture.py $(ARGS)
	test -z "$$PARTITA_BENCHDATA" || $(BIN)/python benchmarks/cross_check.py

golden: $(STAMP) ## Rewrite the golden files, then show what changed.
	$(BIN)/python -m pytest tests/golden --update-golden $(ARGS)
	git diff --stat -- tests/golden

docs: $(STAMP) ## Run the code blocks of the README and of docs/.
	$(BIN)/python -m pytest tests/acceptance $(ARGS)

clean: ## Remove the virtual environment, caches and build results.
	rm -rf $(VENV) build dist $(OUT) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@echo "[1/2] creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
	@echo "[2/2] installing partita and its development tools (once; torch is the large part)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-input $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@
