# `make demo`, `make test` and `make test-slow` need Python 3.11, `make test-pinned` needs Python 3.12, `make test-clients` needs both; all need
# GNU make and the network.
# `make help` lists the rest.
PYTHON ?= $(shell command -v python3.11 || echo python3)
# It is run, not only looked up: pyenv has a python3.12 on the PATH that may refuse to run.
PYTHON312 ?= $(shell for p in python3.12 ~/.pyenv/versions/3.12*/bin/python3.12; do \
  "$$p" -c "" 2>/dev/null && echo "$$p" && exit; done; echo python3)
SAMPLES ?= 40
URL ?= http://127.0.0.1:8000
OUT ?= results/$(shell date +%Y%m%d-%H%M%S)
PORT ?= 8000
MINUTES ?= 30
CONFIG ?= profiles/fast.yaml
SLOW ?= tests
SPEECH ?= tests/speech

# GiB of KV cache on a CPU. Without it, vLLM takes gpu_memory_utilization as a share of RAM.
export VLLM_CPU_KVCACHE_SPACE ?= 1
# The checkpoint is in the repository: vLLM downloads nothing and sends nothing.
export HF_HUB_OFFLINE = 1
export VLLM_NO_USAGE_STATS = 1
export PYTHONUNBUFFERED = 1
# vLLM takes twice as long to start without a bytecode cache.
unexport PYTHONDONTWRITEBYTECODE

# Profiles are for GPUs. On a CPU: no graphs, which take minutes to compile, one API process, and a share of RAM that
# leaves room for others. The contest's configuration stays as it is.
ON_CPU = $(if $(filter-out vllm_config.yaml,$(CONFIG)),-- --enforce-eager --gpu-memory-utilization 0.3 --api-server-count 1)
PICO = --serve vllm_config.yaml --dir pico/checkpoint
.DEFAULT_GOAL := help

demo: .venv/ready ## serve the tiny checkpoint as the contest does, benchmark it, stop it (SAMPLES=40, at most 500)
	@.venv/bin/python -m bench run $(PICO) --samples $(SAMPLES) --out $(OUT)
	@echo "This was vllm_config.yaml, the contest's. 'make serve' serves profiles/fast.yaml, which also has"
	@echo "streams, subtitles, word times, long files and limits."

serve: .venv/ready ## serve the tiny checkpoint until Ctrl-C (PORT=8000 CONFIG=profiles/fast.yaml)
	@.venv/bin/python -m bench serve --config $(CONFIG) --dir pico/checkpoint --port $(PORT) $(ON_CPU)

bench: .venv/ready ## measure a server that is up (URL=http://127.0.0.1:8000 SAMPLES=40)
	@.venv/bin/python -m bench run --url $(URL) --samples $(SAMPLES) --out $(OUT)

# Where several processes share two cores, threads of OpenMP that wait for work by spinning take a tenth of the CPU time.
test test-slow test-pinned test-clients test-speech: export OMP_WAIT_POLICY = passive

# Two sessions at the same time; the output of the first follows that of the second. Unit tests wait as long as they compute,
# so two processes run them: with a lower priority, because the other session takes longer.
test: lint ## lint, types, units, and a real server behind each capability
	@mkdir -p results; nice .venv/bin/python -m pytest -m "not slow" -n 2 --dist loadfile tests/unit > results/units.log 2>&1 & units=$$!; \
	  .venv/bin/python -m pytest -m "not slow" tests/server tests/patches; servers=$$?; \
	  wait $$units; units=$$?; cat results/units.log; exit $$((servers | units))

test-slow: .venv/ready-dev ## the longer tests of vLLM 0.32.0: more servers, longer runs
	@.venv/bin/python -m pytest -m slow $(SLOW)

# kubernetes-validate has the schemas of Kubernetes' own kinds only: no ServiceMonitor, no Kustomization, and no ScaledObject,
# which is KEDA's. tests/unit/test_deploy.py validates the overlays as kubectl renders them.
lint: .venv/ready-dev ## style, types, documentation, and the schemas of the deployment files
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/hadolint Dockerfile
	@.venv/bin/shellcheck entrypoint.sh tests/container/*.sh
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet -f docs/mkdocs.yml
	@.venv/bin/check-jsonschema --quiet --builtin-schema vendor.compose-spec compose.yaml deploy/replicas/compose.yaml
	@.venv/bin/kubernetes-validate --quiet --strict \
	  $(filter-out %/kustomization.yaml %/monitor.yaml %/scale.yaml, $(shell find deploy/kubernetes deploy/nginx -name '*.yaml'))

test-pinned: .venv-pinned/ready ## the tests that need vLLM 0.20.0 or also run on it (Python 3.12, 6 GB)
	@.venv-pinned/bin/python -m pytest tests/pinned tests/patches tests/server/test_shutdown.py tests/unit/test_decode.py tests/unit/test_decoders.py

test-clients: .venv/ready-dev .venv-clients/ready .venv-recipes/ready ## published clients and proxies, unmodified, against a real server (1.3 GB)
	@.venv/bin/python -m pytest tests/clients

test-speech: .venv/ready-dev .venv-omni/ready ## Voxtral TTS and VoxCPM2 of vLLM-Omni on a CPU, with random weights (200 MB)
	@.venv-omni/bin/python -m pytest $(SPEECH)

# Of a Python with vLLM, pytest and what voxtral-serve[gpu,bench] installs: not those of .venv, which have vLLM for CPUs.
test-gpu: ## tests on a GPU, at most 8 minutes, and their record in bench/results/gpu-tests (PYTHON=python3)
	@$(PYTHON) tests/gpu/run.py

# As root on Debian, with its packages buildah, podman, runc, uidmap and debootstrap: no daemon, no registry.
test-container: .venv-pinned/ready ## build the image and run it on a CPU, without a registry (root, Debian, 20 minutes)
	@.venv-pinned/bin/python -m pytest tests/container

# It publishes nothing. The last lines are the commands that give the commit and the images their names.
release: .venv-release/ready ## build sdist and wheel of the last commit twice, compare, check, install; into results/release
	@.venv-release/bin/python -m tools.release

# Written to results/ first: a checkout without the committed result files would be recorded as changed.
bench-full: .venv/ready ## measure all 500 clips on the tiny checkpoint, into bench/results/pico-cpu (10 minutes)
	@rm -rf results/pico-cpu
	@.venv/bin/python -m bench run $(PICO) --out results/pico-cpu
	@cd results/pico-cpu && cp report.md report.html requests.jsonl run.json summary.json ../../bench/results/pico-cpu/

reference: .venv/ready ## transcribe all 500 clips with the reference model, into bench/results/pico-reference (2 minutes)
	@.venv/bin/python -m pico.evaluate --out bench/results/pico-reference

soak: .venv/ready-dev ## serve pico to clients, attackers and an endless session, into bench/results/soak-cpu.json (MINUTES=30, and 20 more)
	@cd tests/support && PYTHONPATH=../.. ../../.venv/bin/python -m soak --minutes $(MINUTES) --out ../../bench/results/soak-cpu.json

# No --upgrade for pinned.txt: its versions were tested with vLLM 0.20.0.
lock: ## update the pins and hashes of requirements/*.in (needs uv)
	uv pip compile --python-version 3.11 --python-platform x86_64-manylinux_2_28 --generate-hashes --no-header -q \
	  --upgrade --override requirements/cpu-overrides.txt -o requirements/cpu.txt requirements/cpu.in
	uv pip compile --python-version 3.11 --python-platform x86_64-manylinux_2_28 --generate-hashes --no-header -q \
	  --upgrade -o requirements/dev.txt requirements/dev.in
	uv pip compile --python-version 3.12 --python-platform x86_64-manylinux_2_28 --generate-hashes --no-header -q \
	  --override requirements/pinned-overrides.txt -o requirements/pinned.txt requirements/pinned.in
	uv pip compile --python-version 3.12 --python-platform x86_64-manylinux_2_28 --generate-hashes --no-header -q \
	  --upgrade --override requirements/container-overrides.txt -c requirements/cpu.txt \
	  -o requirements/container-0.32.0.txt requirements/container.in
	uv pip compile --python-version 3.12 --python-platform x86_64-manylinux_2_28 --generate-hashes --no-header -q \
	  --upgrade --override requirements/container-overrides.txt -c requirements/pinned.txt \
	  -o requirements/container-0.20.0.txt requirements/container.in
	uv pip compile --python-version 3.12 --python-platform x86_64-manylinux_2_28 --generate-hashes --no-header -q \
	  --upgrade -o requirements/wheel.txt requirements/wheel.in
	uv pip compile --python-version 3.11 --python-platform x86_64-manylinux_2_28 --generate-hashes --no-header -q \
	  --upgrade -c requirements/wheel.txt -o requirements/release.txt requirements/release.in
	uv pip compile --python-version 3.11 --python-platform x86_64-manylinux_2_28 --generate-hashes --no-header -q \
	  --upgrade -o requirements/clients.txt requirements/clients.in
	uv pip compile --python-version 3.12 --python-platform x86_64-manylinux_2_28 --generate-hashes --no-header -q \
	  --upgrade -o requirements/recipes.txt requirements/recipes.in
	uv pip compile --no-deps --python-version 3.11 --python-platform x86_64-manylinux_2_28 --generate-hashes --no-header -q \
	  --upgrade -o requirements/omni.txt requirements/omni.in

docs: .venv/ready-dev ## serve the documentation on http://127.0.0.1:8001
	@.venv/bin/mkdocs serve -f docs/mkdocs.yml -a 127.0.0.1:8001

tables: .venv/ready-dev ## write the generated tables of README and docs, from bench/results, the patches and the fields
	@.venv/bin/python -m tools.tables

clean: ## remove what the other targets made, including the environments
	rm -rf .venv .venv-pinned .venv-clients .venv-recipes .venv-omni .venv-release results bench/results/*/server.log .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Files that are copied into site-packages. The rest of src is linked, so a change needs no new environment.
PACKAGE = pyproject.toml src/voxtral_serve.pth

.venv/ready: requirements/cpu.txt requirements/torch-cpu.txt requirements/vllm-alias/pyproject.toml $(PACKAGE)
	@rm -f .venv/ready .venv/ready-dev
	@$(PYTHON) tools/setup_venv.py

.venv/ready-dev: .venv/ready requirements/dev.txt
	@rm -f .venv/ready-dev
	@$(PYTHON) tools/setup_venv.py --dev

.venv-pinned/ready: requirements/pinned.txt requirements/vllm-alias-pinned/pyproject.toml $(PACKAGE)
	@rm -f .venv-pinned/ready
	@$(PYTHON312) tools/setup_venv.py --pinned

.venv-clients/ready: requirements/clients.txt
	@rm -f .venv-clients/ready
	@$(PYTHON) tools/setup_venv.py --clients

.venv-recipes/ready: requirements/recipes.txt
	@rm -f .venv-recipes/ready
	@$(PYTHON312) tools/setup_venv.py --recipes

.venv-release/ready: requirements/release.txt
	@rm -f .venv-release/ready
	@$(PYTHON) tools/setup_venv.py --release

# Its tests also need what .venv-omni is on top of: .venv with --dev.
.venv-omni/ready: .venv/ready requirements/omni.txt
	@rm -f .venv-omni/ready
	@$(PYTHON) tools/setup_venv.py --omni

.PHONY: demo serve bench test test-slow lint test-pinned test-clients test-speech test-container test-gpu release bench-full reference soak lock docs tables clean help
