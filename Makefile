# make lab                        JupyterLab with the notebooks (makes .venv the first time)
# make lab PORT=8890 BROWSER=no   the same, served on a port of your choice, without opening a browser
# make test                       everything: ruff, pytest, the notebooks
# make test-fast                  what takes a few minutes
# make notebooks                  build notebooks/*.ipynb from notebooks/src/*.py, executed
# make clean                      remove .venv and whatever was built
#
# Needs Python 3.11 or newer, git and make. Works with GNU make 3.81, the one macOS brings.

PYTHON  ?= python3
BROWSER ?= yes
PORT    ?=
# Test files run side by side: most of them wait, for ranks to start or for a time limit. Those in ALONE kill, time and limit
# what they start, so nothing else runs beside them.
WORKERS ?= 2
ALONE   := tests/bench tests/browser tests/lab tests/train
VENV    ?= .venv
BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --disable-pip-version-check --quiet install --constraint constraints.txt
START   := notebooks/00_meet_the_ranks.ipynb

ifeq ($(OS),Windows_NT)
$(error Windows itself is not supported; use WSL2: run "wsl --install" in PowerShell, then "make lab" inside the Linux shell)
endif

# One thread a rank: several ranks share this machine's cores.
export OMP_NUM_THREADS := 1
# The notebooks are run by the same interpreter as everything else.
export JUPYTER_PREFER_ENV_PATH := 1

.PHONY: lab test test-fast notebooks clean help

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

lab: $(VENV)/.lab
	@$(BIN)/python notebooks/serve.py --port "$(PORT)" --browser "$(BROWSER)" $(START)

test: $(VENV)/.test
	$(BIN)/ruff check .
	@status=0; set -x; \
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --nbval-lax --nbval-cell-timeout=120 tests notebooks $(addprefix --ignore=,$(ALONE)) || status=1; \
	$(BIN)/python -m pytest $(ALONE) || status=1; \
	exit $$status

test-fast: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow" tests

notebooks: $(VENV)/.test
	$(BIN)/python notebooks/build.py

# The stamps: a second call has nothing to do until a version or a dependency changes.
$(VENV)/.python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found; install Python 3.11 or newer, or name it: make lab PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is `$(PYTHON) -V 2>&1`, which is too old; install Python 3.11 or newer and name it: make lab PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) has no venv module; on Debian and Ubuntu: sudo apt-get install python3-venv" >&2; exit 1; }
	@echo "making $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# torch first, in the pinned version: where pip has been given a CPU build of it, that one is taken and the rest builds on it.
$(VENV)/.lab: $(VENV)/.python pyproject.toml constraints.txt
	@echo "installing into $(VENV) (minutes the first time) ..."
	@$(PIP) torch
	@$(PIP) --editable ".[lab]"
	@touch $@

$(VENV)/.test: $(VENV)/.lab
	@$(PIP) --editable ".[test]"
	@touch $@

clean:
	rm -rf $(VENV) build dist runs *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name .ipynb_checkpoints -type d -prune -exec rm -rf {} +
