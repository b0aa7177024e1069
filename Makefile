# `make demo` and `make test` need Python 3.11, GNU make and the network; `make help` lists the rest.
PYTHON ?= $(shell command -v python3.11 || echo python3)
SAMPLES ?= 40
URL ?= http://127.0.0.1:8000
OUT ?= results/$(shell date +%Y%m%d-%H%M%S)
PORT ?= 8000

# What a CPU needs besides vllm_config.yaml: a KV cache in GiB, since gpu_memory_utilization would be a share of RAM.
export VLLM_CPU_KVCACHE_SPACE ?= 1
# The checkpoint is in the repository: vLLM has nothing to fetch, and sends nothing.
export HF_HUB_OFFLINE = 1
export VLLM_NO_USAGE_STATS = 1
export PYTHONUNBUFFERED = 1
# Without its bytecode cache, vLLM takes twice as long to start.
unexport PYTHONDONTWRITEBYTECODE

PICO = --serve vllm_config.yaml --dir pico/checkpoint
.DEFAULT_GOAL := help

demo: .venv/ready ## serve the tiny checkpoint, benchmark it, stop it (SAMPLES=40, at most 500)
	@.venv/bin/python -m bench run $(PICO) --dataset bench/data --samples $(SAMPLES) --out $(OUT)

serve: .venv/ready ## serve the tiny checkpoint until Ctrl-C (PORT=8000)
	@.venv/bin/python -m bench serve --config vllm_config.yaml --dir pico/checkpoint --port $(PORT)

bench: .venv/ready ## benchmark a server that is up (URL=http://127.0.0.1:8000 SAMPLES=40)
	@.venv/bin/python -m bench run --url $(URL) --dataset bench/data --samples $(SAMPLES) --out $(OUT)

test: .venv/ready-dev ## lint, types and all tests, with real servers
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/python -m pytest

# Measured aside first: a checkout whose result files are missing would be recorded as changed.
bench-full: .venv/ready ## all 500 clips on the tiny checkpoint, anew into bench/results/pico-cpu (10 minutes)
	@rm -rf results/pico-cpu
	@.venv/bin/python -m bench run $(PICO) --dataset bench/data --out results/pico-cpu
	@cd results/pico-cpu && cp report.md requests.jsonl run.json summary.json ../../bench/results/pico-cpu/

reference: .venv/ready ## all 500 clips through the reference model, into bench/results/pico-reference (2 minutes)
	@.venv/bin/python -m pico.evaluate --out bench/results/pico-reference

lock: ## pin and hash requirements/*.in anew (needs uv)
	uv pip compile --python-version 3.11 --python-platform x86_64-manylinux_2_28 --generate-hashes --no-header -q \
	  --upgrade --override requirements/cpu-overrides.txt -o requirements/cpu.txt requirements/cpu.in
	uv pip compile --python-version 3.11 --python-platform x86_64-manylinux_2_28 --generate-hashes --no-header -q \
	  --upgrade -o requirements/dev.txt requirements/dev.in

clean: ## remove what the other targets made, the environment included
	rm -rf .venv results bench/results/*/server.log build src/*.egg-info requirements/vllm-alias/build requirements/vllm-alias/*.egg-info \
	  .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.venv/ready: requirements/cpu.txt requirements/torch-cpu.txt requirements/vllm-alias/pyproject.toml pyproject.toml
	@rm -f .venv/ready .venv/ready-dev
	@$(PYTHON) tools/setup_venv.py

.venv/ready-dev: .venv/ready requirements/dev.txt
	@rm -f .venv/ready-dev
	@$(PYTHON) tools/setup_venv.py --dev

.PHONY: demo serve bench test bench-full reference lock clean help
