# Two commands matter: `make book` and `make test`. Both set up .venv by themselves; the second time they find it ready.
# On Linux without a GPU, `make book TORCH=cpu` takes the CPU build of PyTorch in place of gigabytes of CUDA.

.DEFAULT_GOAL := help
.PHONY: moved help book test lint types pytest notebooks lab format evidence torture clean

# Threads that wait sleep: on a busy machine spinning ones take ten times as long.
export OMP_WAIT_POLICY ?= passive

PYTHON ?=
TORCH ?=
OPEN ?= yes
BIN := .venv/bin
READY := .venv/ready
SITE := _build/html/index.html

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  Switches: TORCH=cpu (PyTorch without CUDA), PYTHON=python3.12 (which Python), OPEN=no (do not open the site)"

# .venv/ready holds the directory that it was made in: a moved checkout is set up again.
MOVED := $(filter-out $(CURDIR),$(shell cat $(READY) 2>/dev/null))

$(READY): pyproject.toml constraints.txt .ci/setup $(if $(MOVED),moved)
	@PYTHON="$(PYTHON)" TORCH="$(TORCH)" sh .ci/setup

book: $(READY) ## run the notebooks that changed (or whose package did), build the site, open it
	@$(BIN)/jupyter-book build . -W -n --keep-going
	@echo "The book: file://$(CURDIR)/$(SITE)"
	@if [ "$(OPEN)" = yes ] && [ -z "$$CI" ] && { [ -n "$$DISPLAY$$WAYLAND_DISPLAY" ] || [ "$$(uname)" = Darwin ]; }; \
	then $(BIN)/python -m webbrowser "file://$(CURDIR)/$(SITE)" >/dev/null 2>&1 || true; fi

test: lint types pytest notebooks ## linter, type checker, tests, every notebook against its stored outputs

lint: $(READY) ## ruff: rules and format
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(READY) ## mypy over the package
	@$(BIN)/mypy gptoss

pytest: $(READY) ## the tests, without the notebooks
	@$(BIN)/python -m pytest

notebooks: $(READY) ## run every notebook, compare with its stored outputs
	@$(BIN)/python book/extensions/notebook_outputs.py check

lab: $(READY) ## open Jupyter in the environment
	@$(BIN)/jupyter lab

format: $(READY) ## put code and notebooks into ruff's format
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

evidence: $(READY) ## measure again what book/evidence holds (one GPU, minutes)
	@$(BIN)/gptoss bench all

torture: $(READY) ## the tests that take long: kills, full disks, many resumes
	@$(BIN)/python -m pytest -m torture

clean: ## remove what was built; .venv stays (rm -r .venv starts over)
	@rm -rf _build .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
