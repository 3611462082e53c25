# Everything a newcomer or CI does. The virtual environment is .venv; ARGS="..." is passed on to train and test.

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help install train test check format clean

help: ## say what can be made
	@echo 'make <target> [ARGS="..."] [PYTHON=python3.12]'
	@sed -n 's/^\([a-z]*\):.*## \(.*\)$$/  \1 \2/p' Makefile | while read -r target text; do printf '  %-8s %s\n' "$$target" "$$text"; done

install: .venv/installed ## create .venv and install fourfold into it
	@echo 'fourfold is installed; try $(BIN)/fourfold --help'

train: .venv/installed ## install, then train the quickstart model
	@$(BIN)/fourfold train configs/quickstart.yaml $(ARGS)

test: .venv/installed-dev ## run the tests: make test ARGS="-k resume"
	@$(BIN)/pytest $(ARGS)

check: .venv/installed-dev ## formatting, lint, types and the direction of imports
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: .venv/installed-dev ## format the code and fix what lint can fix
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean: ## remove caches and build leftovers; .venv and output/ stay
	@rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find fourfold tests -name __pycache__ -type d -prune -exec rm -rf {} +

# pip's own words go to a file and are shown only when it fails.
define pip_install
	@if ! $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e '$(1)' >.venv/install.log 2>&1; then \
		tail -n 30 .venv/install.log; \
		echo 'pip could not install fourfold; its last words are above, all of them in .venv/install.log.'; \
		exit 1; \
	fi
	@touch $@
endef

.venv/installed: pyproject.toml constraints.txt | .venv/bin/pip
	@echo 'Installing fourfold and PyTorch into .venv; the first time this takes a few minutes.'
	$(call pip_install,.)

.venv/installed-dev: .venv/installed
	@echo 'Installing the development tools into .venv.'
	$(call pip_install,.[dev])

.venv/bin/pip:
	@command -v '$(PYTHON)' >/dev/null || { \
		echo '$(PYTHON) was not found; fourfold needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ...'; exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is $$('$(PYTHON)' --version 2>&1); fourfold needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	@'$(PYTHON)' -c 'import ensurepip, venv' 2>/dev/null || { \
		echo '$(PYTHON) cannot create virtual environments; install its venv module (on Debian and Ubuntu: apt install python3-venv).'; exit 1; }
	@echo 'Creating .venv.'
	@'$(PYTHON)' -m venv .venv
