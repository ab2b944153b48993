# The daily commands; docs/development.md explains them. They install their dependencies into .venv.
#
#   make serve   install if needed, then serve the demo model   (ARGS="--port 8000")
#   make test    install if needed, then run the tests          (ARGS="tests/unit -k radix")
#   make check   lint, format, types, import contracts, repository rules
#   make fmt     format the code and apply the automatic repairs of lint
#   make proof   the tests that take minutes each
#   make k8s     the chart on a cluster: kind, or ARGS="--provider existing --context NAME ..."
#   make chart   generate the chart's schema and dashboards
#   make lines   count the code lines of the packages and of the core
#   make image   build the CUDA image; image-cpu: the demo      (BUILD_ARGS="--build-arg ...")
#   make release-check   build sdist and wheel, install the wheel alone, serve the demo
#   make lock    resolve the dependencies and write constraints.txt
#   make clean   remove everything that the other commands created
#
# PYTHON=python3.12    the interpreter that creates .venv; default: the first of python3, python3.14, python3.13,
#                      python3.12 and python3.11 whose version is 3.11 to 3.14
# TORCH_INDEX=URL      the package index for torch alone, for example the CPU builds at
#                      https://download.pytorch.org/whl/cpu; default: pip's default index
# TEST_JOBS=3          the number of pytest workers
# IMAGE=NAME           the name of the images; default: ghcr.io/minisgl/minisgl
# PLATFORMS=LIST       the platforms of the images, such as linux/amd64,linux/arm64; default: that of this machine

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
TORCH_INDEX ?=
TEST_JOBS ?= 3
IMAGE ?= ghcr.io/minisgl/minisgl
BUILD_ARGS ?=
PLATFORMS ?=
# The only version that `make lock` does not choose itself. The build of torch decides whether a download
# has 200 MB or 2.5 GB, and an index does not have every build of every version.
TORCH_VERSION ?= 2.13.0

# Some images set this variable. Each process of a test or a server would then compile all sources again.
unexport PYTHONDONTWRITEBYTECODE

in_range := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
PYTHON ?= $(firstword $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c '$(in_range)' 2>/dev/null && echo $$p; done) python3)

pip = $(1)/bin/python -m pip --disable-pip-version-check
# $(call new_venv,DIRECTORY,INTERPRETER) creates a virtual environment. It keeps a working environment and
# replaces an incomplete one.
define new_venv
	@$(2) -c '' 2>/dev/null || { echo "minisgl: no working '$(2)': install Python 3.11 to 3.14 (Debian, Ubuntu: apt install python3 python3-venv)" >&2; exit 1; }
	@$(2) -c '$(in_range)' || { echo "minisgl: needs Python 3.11 to 3.14, but $(2) is $$($(2) -V 2>&1): select another with 'make PYTHON=python3.12 ...'" >&2; exit 1; }
	@$(2) -c 'import ensurepip, venv' 2>/dev/null || { echo "minisgl: $(2) has no venv module (Debian, Ubuntu: apt install $$($(2) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'))" >&2; exit 1; }
	@$(call pip,$(1)) --version >/dev/null 2>&1 || { echo "$(2) -m venv $(1)"; $(2) -m venv --clear $(1); }
endef
# $(call add_torch,DIRECTORY,ARGUMENTS) installs torch alone from TORCH_INDEX. A later call of pip installs the
# dependencies of torch from pip's default index.
define add_torch
	$(if $(TORCH_INDEX),$(call pip,$(1)) install $(2) --no-compile --no-deps --index-url $(TORCH_INDEX))
endef
# $(call compile,DIRECTORY) compiles the installed packages on all cores. pip would compile 19,000 files on one core.
# The exit status counts files for other versions of Python, which some packages hold.
compile = $(1)/bin/python -m compileall -qq -j 0 $(1)/lib || true

.DEFAULT_GOAL := help
.PHONY: help serve test check check-types check-rules fmt proof k8s chart lines image image-cpu release-check lock clean

help:
	@sed -n 's/^#   make/make/p' Makefile

serve: $(VENV)/.serve
	@exec $(BIN)/minisgl $(ARGS)

# Each worker uses one thread for matrix products: on two cores, two workers with two threads each would wait for
# one another. A third worker uses the time in which tests wait for processes. tests/conftest.py mixes the files of
# both kinds.
test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

proof: $(VENV)/.dev
	$(BIN)/python -m pytest -m proof $(ARGS)
	$(if $(ARGS),,$(BIN)/python -m pytest -m hypothesis --hypothesis-profile deep)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory -j2 --output-sync=target check-types check-rules

check-types:
	$(BIN)/mypy
	$(BIN)/lint-imports

check-rules:
	$(BIN)/python -m pytest -q tests/repo

fmt: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.serve: pyproject.toml constraints.txt
	$(call new_venv,$(VENV),$(PYTHON))
	$(call pip,$(VENV)) install -q -c constraints.txt setuptools
	$(call add_torch,$(VENV),-c constraints.txt torch)
	$(call pip,$(VENV)) install --no-compile -c constraints.txt --no-build-isolation -e .
	$(call compile,$(VENV))
	@touch $@

$(VENV)/.dev: $(VENV)/.serve
	$(call pip,$(VENV)) install -q --no-compile -c constraints.txt --no-build-isolation -e '.[test,dev,chart,k8s]'
	$(call compile,$(VENV))
	@touch $@

k8s: $(VENV)/.dev
	$(BIN)/python -m pytest k8s-tests $(ARGS)

chart: $(VENV)/.dev
	$(BIN)/python -m tools.chart

lines: $(VENV)/.serve
	$(BIN)/python -m tools.lines

# The tags must equal those of the chart: its appVersion, and the tag in helm/ci/cpu-demo-values.yaml.
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"$$/\1/p' minisgl/__init__.py)
docker_build = DOCKER_BUILDKIT=1 docker build --build-arg VERSION=$(VERSION) \
	--build-arg REVISION=$(shell git rev-parse HEAD 2>/dev/null || echo unknown) \
	$(if $(TORCH_INDEX),--build-arg TORCH_INDEX=$(TORCH_INDEX)) \
	$(if $(PLATFORMS),--platform $(PLATFORMS)) $(BUILD_ARGS)

image:
	$(docker_build) -f docker/Dockerfile -t $(IMAGE):$(VERSION) .

image-cpu:
	$(docker_build) -f docker/Dockerfile.cpu -t $(IMAGE):$(VERSION)-cpu .

# The wheel is built from the sdist, and its environment has only the dependencies that the package names.
RELEASE := build/release
release-check: $(VENV)/.serve
	rm -rf $(RELEASE)
	$(BIN)/python -c 'from setuptools import build_meta; build_meta.build_sdist("$(RELEASE)")' >/dev/null
	$(call pip,$(VENV)) wheel -q --no-deps --no-build-isolation -w $(RELEASE) $(RELEASE)/*.tar.gz
	$(call new_venv,$(RELEASE)/venv,$(PYTHON))
	$(call add_torch,$(RELEASE)/venv,-q -c constraints.txt torch)
	$(call pip,$(RELEASE)/venv) install -q --no-compile -c constraints.txt $(RELEASE)/*.whl
	@ls $(RELEASE)/*.tar.gz $(RELEASE)/*.whl
	$(BIN)/python -m tools.release $(RELEASE)/venv

# The lock uses the oldest supported Python, because the newer ones can install all versions that the oldest can.
# It leaves out the CUDA packages, because each CUDA build of torch pins its own.
LOCK := build/lock
lock:
	rm -rf $(LOCK)
	$(call new_venv,$(LOCK),python3.11)
	$(call add_torch,$(LOCK),torch==$(TORCH_VERSION))
	$(call pip,$(LOCK)) install -q torch==$(TORCH_VERSION) -e '.[test,dev,chart,k8s]'
	@{ sed -n '/^#/p' constraints.txt; \
	  $(call pip,$(LOCK)) freeze --all --exclude-editable \
	    | sed -E '/^(pip|wheel|triton|nvidia-.*|cuda-.*)==/Id; s/^(torch==[^+]*)\+.*/\1/'; \
	} > $(LOCK).txt
	@if grep -vE '^(#.*|[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*)$$' $(LOCK).txt; then \
	  echo "make lock: the lines above are not plain pins, constraints.txt is left as it was" >&2; exit 1; fi
	mv $(LOCK).txt constraints.txt
	rm -rf $(LOCK)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
