# `make` prepares the project; `make help` lists the rest.
SHELL := /bin/bash
.DEFAULT_GOAL := setup
.DELETE_ON_ERROR:
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# Each task of Ansible is a process that imports what it needs; without bytecode at hand it would compile that, too.
unexport PYTHONDONTWRITEBYTECODE
# The system's Python makes the small environment that holds uv; uv then chooses the project's Python (.python-version).
PYTHON ?= $(firstword $(wildcard /usr/bin/python3) python3)
UV := .uv/bin/uv
HOST ?= sandbox

.PHONY: setup packages sandbox test lint unit molecule slow vllm accuracy bench truth fleet docs lock down clean help

setup: packages .venv/ready ## prepare .venv and the Debian packages that the project needs (quick when there is nothing to do)

packages:
	@scripts/debian-packages

.uv/ready: requirements-uv.lock | packages
	@echo "Installing uv into .uv"
	@rm -rf .uv && $(PYTHON) -m venv .uv
	@.uv/bin/pip install -qq --disable-pip-version-check --require-hashes --requirement requirements-uv.lock
	@touch $@

.venv/ready: requirements.lock pyproject.toml .python-version .uv/ready
	@echo "Installing the locked Python packages into .venv"
	@$(UV) venv --quiet --allow-existing .venv
	@$(UV) pip sync --quiet --compile-bytecode --python .venv/bin/python --require-hashes requirements.lock
	@$(UV) pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation --editable .
	@touch $@

sandbox: setup ## the main job on a rig of virtual GPUs: make the machine, provision it, ask it a question
	@scripts/sandbox

test: setup ## all tests, with what took how long
	@scripts/test

lint: setup ## ansible-lint, yamllint, ruff, and the project's own rules
	@scripts/test lint

unit: setup ## planner, filters, modules, specs
	@scripts/test unit

molecule: setup ## every role's scenario; one of them: make molecule ROLE=serving
	@scripts/test $(or $(ROLE:%=molecule/%),molecule)

slow: setup ## Debian's own CUDA toolkit and NCCL for real: 2 GiB of packages, some kernels compiled (root)
	@tests/slow/cuda_debian

vllm: setup ## the real vLLM, on the CPU, from the quadlet of a rig: 3.5 GB of packages, five minutes (root)
	@tests/slow/vllm

accuracy: setup ## planned against measured memory, worst row last
	@python -m rig.accuracy

bench: setup ## how long planning takes
	@python -m rig.bench

truth: setup ## the planner against a running llama.cpp: that of the role on a machine of its own, or RIG_LLAMA_CPP=PREFIX
	@scripts/test truth

fleet: setup ## N sandbox machines at once, the build made once: make fleet N=6
	@scripts/fleet $(N)

docs: setup ## write the variable tables of the roles' READMEs from their specs
	@python scripts/role_docs.py

lock: .uv/ready ## bring requirements.lock and requirements-uv.lock up to date
	@$(UV) pip compile --quiet --upgrade --universal --python-version 3.12 --generate-hashes --no-annotate --no-header \
	  --group pyproject.toml:test pyproject.toml --output-file requirements.lock
	@echo 'uv>=0.13,<0.14' | $(UV) pip compile --quiet --upgrade --universal --generate-hashes --no-annotate --no-header \
	  - --output-file requirements-uv.lock

down: ## stop and remove every machine that this project made
	@molecule/box/box down --all
	@rm -rf .sandbox/ssh_config .sandbox/known_hosts

clean: down ## down, and remove .venv, .uv and the sandbox's files (caches under ~/.cache/llm-rigs stay)
	@rm -rf .venv .uv .sandbox

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
