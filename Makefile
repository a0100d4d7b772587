# `make` shows what there is. Every target works on a fresh checkout: it installs what it needs first.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

# The first Python that is new enough, else python3, about which setup then says what is wrong.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; exit; }; done; echo python3)
BIN := .venv/bin
ARGS ?=
# Many tests wait for real deadlines and heartbeats, so a few more processes than cores are busy at once.
JOBS ?= 3
NAME ?=
ID ?=
# The oldest processors that wheels are made for: x86-64-v3 means AVX2 (2013); on ARM armv8-a.
MARCH ?= $(if $(filter x86_64,$(shell uname -m)),x86-64-v3,armv8-a)

.PHONY: help setup setup-full up wheels test guards soak lint format bench lock clean

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## check the prerequisites and install into .venv (no root)
	@$(PYTHON) scripts/setup.py

setup-full: setup ## as root on Debian: also what only some tests need (Redis 7.0, kubectl, Chromium, Prometheus)
	@scripts/setup_full.sh

up: setup ## start an instance on http://127.0.0.1:8080; Ctrl-C stops it (ARGS="--port 9000 --detach")
	@exec $(BIN)/spillway up $(ARGS)

wheels: setup ## write into dist/ what installs without a compiler or a checkout (MARCH=x86-64-v3)
	@$(BIN)/python scripts/image.py compiled --march $(MARCH) --wheels dist
	@$(BIN)/python scripts/image.py ours --wheels dist

test: setup ## run the tests, tier after tier (ARGS="-k name", ARGS=tests/unit)
	@JOBS=$(JOBS) $(BIN)/python scripts/run_tests.py $(ARGS)

guards: setup ## compare with an earlier checkout: recorded answers, kills, speed (ARGS="--against PATH")
	@$(BIN)/python -m tests.guards.run $(ARGS)

soak: setup ## run the long tests in pieces that resume (NAME=piece, ARGS=--list)
	@$(BIN)/python scripts/soak.py $(NAME) $(ARGS)

lint: setup ## ruff, formatting, mypy --strict
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@cd client && ../$(BIN)/mypy

format: setup ## format the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: setup ## run a benchmark (ID=E1, ARGS=--quick); without ID: list them
	@$(BIN)/spillway bench $(if $(ID),$(ID),--list) $(ARGS)

lock: setup ## write requirements.lock anew from pyproject.toml (needs uv)
	@UV=$${UV:-uv} scripts/lock.sh $(ARGS)

clean: ## remove caches (not .venv, not data)
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
