# Two commands do everything: `make serve` and `make test`. Both build .venv first when it is missing or out of date.
#   make serve ARGS="--port 8123 --depth 8"     make test ARGS="tests/cli -k flags"     make setup     make clean
# While you work: `make check` (lint, types, layers). Before you hand in: `make prove` (what `make test` leaves out).
SHELL := /bin/sh
VENV ?= .venv
BIN := $(VENV)/bin
# Workers of the tests. On two cores a third and a fourth gain no time: those that share a core empty each other's caches.
JOBS ?= 2
ARGS ?=

# uv installs in a sixth of the time that pip takes. Where it is missing, pip fetches it; where it fails, pip does the rest.
# It does not read pip's settings, so those that say where packages come from are passed on to it.
UV = $(shell command -v uv || ls $(BIN)/uv 2>/dev/null)
PIP = $(BIN)/python -m pip
SET_FOR_PIP = $${PIP_$(2):-$(shell $(PIP) config get global.$(1) 2>/dev/null)}
UV_READS = UV_FIND_LINKS="$${UV_FIND_LINKS:-$$(echo $(call SET_FOR_PIP,find-links,FIND_LINKS) | tr ' ' ',')}" \
	UV_DEFAULT_INDEX="$${UV_DEFAULT_INDEX:-$(call SET_FOR_PIP,index-url,INDEX_URL)}"
# A fifth of all modules is ever imported: Python compiles those when it first does.
HELD ?= constraints.txt
PIP_INSTALL = $(PIP) install --no-compile -c $(HELD)
UV_INSTALL = $(UV_READS) $(UV) pip install --quiet --python $(BIN)/python -c $(HELD)
INSTALL = $(if $(UV),$(UV_INSTALL) $(1) || $(PIP_INSTALL) $(1),$(PIP_INSTALL) $(1))

.PHONY: setup serve check test prove newest coverage pythons sim mutation kills qemu wheel wheel-serves docs clean

# The C++ is built now, so that no start has to; without a compiler it says so.
setup: $(VENV)/.setup
	@$(BIN)/python -m gapless.cli.native
	@echo "$(VENV) is ready: try $(BIN)/gapless serve"

serve: $(VENV)/.setup
	@$(BIN)/gapless serve $(ARGS)

# mypy keeps what it knows in .mypy_cache: the first run takes most of a minute, the next ones a second.
check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --noconftest $(addprefix tests/test_,layers.py banned_names.py names_of_tests.py)
	@$(BIN)/python tests/test_layers.py

# One thread of arithmetic a worker: two workers that both take every core slow each other down.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

# These tests, those on the fake accelerator in processes of their own, where torch sees no other. ARGS may name no test
# of one kind: 5.
APART = $(PYTEST) -m "($(1)) and not fake" $(2) $(if $(2),|| test $$? = 5) && \
	CUDA_VISIBLE_DEVICES= $(PYTEST) -m "($(1)) and fake" $(2) $(if $(2)$(filter-out all,$(ONLY)),|| test $$? = 5)

# The sharpest cases of every kind. `doctor` builds the C++ first, so that no test waits for it.
# Tests are compiled once, while that builds, and not by every process that a test starts.
COMPILE = $(if $(ARGS)$(wildcard $(VENV)/.compiled),,$(BIN)/python -m pytest --collect-only -qq >/dev/null; \
	touch $(VENV)/.compiled;)
LATER = process or seeds or aot or raced or net
test: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/.test
	@{ :; $(COMPILE) } & $(BIN)/gapless doctor || true; wait $$!
	$(call APART,not ($(LATER) or house),$(ARGS))

# The rest, by the marks of pyproject.toml: make prove ONLY=oracles after a change below loop/, plan/, step/, memory/
ONLY ?= all
PROVE_all = $(LATER)
PROVE_oracles = seeds or raced
IN_oracles = $(addprefix tests/,loop plan step memory simulation mutation regressions)
PROVE_kernels = aot
PROVE_processes = process or net
prove: export PYTHONDONTWRITEBYTECODE =
prove: $(VENV)/.test
	$(call APART,$(or $(PROVE_$(ONLY)),$(error ONLY is all, oracles, kernels or processes)),$(IN_$(ONLY)) $(ARGS))
	$(if $(ARGS)$(filter-out all,$(ONLY)),,@$(MAKE) --no-print-directory newest)

# The tests of the sanitizer and of the fake accelerator on the torch that a new user gets: built for CUDA, 5.5 GB in
# .venv-newest, three quarters of a minute where packages come quickly. Where it cannot be had, one line says why.
NEWEST := .venv-newest
NEWEST_TORCH := 2.14.1
newest: export PYTHONDONTWRITEBYTECODE =
newest: $(VENV)/.setup
	@if said=$$(timeout 300 $(MAKE) -s $(NEWEST)/.newest VENV=$(NEWEST) HELD=$(NEWEST)/held.txt UV="$(UV)" 2>&1); then \
		echo "tests/guard on torch $$($(NEWEST)/bin/python -c 'import torch; print(torch.__version__)'):"; \
		export OMP_NUM_THREADS=1; $(NEWEST)/bin/python -m pytest -n $(JOBS) --dist loadgroup -m "not process and not fake" \
			tests/guard --ignore=tests/guard/test_race_engine.py $(ARGS) && \
		CUDA_VISIBLE_DEVICES= $(NEWEST)/bin/python -m pytest -n $(JOBS) --dist loadgroup -m "fake and not process" \
			tests/guard tests/testing/test_fake_accelerator.py $(ARGS) && \
		$(NEWEST)/bin/python -m pytest -n $(JOBS) --dist loadgroup -m process \
			$(addprefix tests/guard/test_,pytest_session.py san_children.py kinds.py) $(ARGS); \
	else \
		echo "make newest is skipped, torch $(NEWEST_TORCH) is not here:" \
			"$$(printf '%s' "$$said" | grep -v "^make.*Error" | tail -n 1 | grep . || echo it was not installed in 300 s)"; \
	fi

$(VENV)/.newest: pyproject.toml constraints.txt | $(BIN)/python
	@test "$$(df -Pm . | awk 'END { print $$4 }')" -gt 12000 || { echo "it takes 12 GB of disk, which are not free"; exit 1; }
	@sed '/^torch==/d; /^triton==/d' constraints.txt >$(HELD)
	@$(call INSTALL,torch==$(NEWEST_TORCH) -e . pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis httpx jsonschema)
	@touch $@

# Branch coverage of the core rooms by the tests that are theirs, as a table; ARGS=--missing lists what no test reaches.
# Tracing slows Python down: without no_sync, and without tests of threads that hang, whose processes it keeps alive.
MEASURED = tests/base tests/device tests/memory tests/plan tests/step tests/loop tests/engine/test_core.py \
	tests/engine/test_driver.py tests/engine/test_process_backend.py tests/engine/test_watch.py \
	tests/guard/test_race_engine.py tests/guard/test_race_graphs.py tests/kernels/test_ahead_triton.py \
	tests/engine/test_logits_processors.py tests/offload/test_peer_hosts.py tests/offload/test_peer_tls.py \
	tests/cli/test_flags.py tests/grammar/test_form_kinds.py \
	"tests/simulation/test_simulation.py::test_no_seed_of_the_simulator_fails[1]" \
	--deselect "tests/device/test_cpu_device.py::test_close_leaves_a_hanging_thread_behind_and_says_so" \
	--deselect "tests/device/test_cpu_device.py::test_the_interpreter_exits_with_an_open_device"

coverage: export OMP_NUM_THREADS = 1
coverage: $(VENV)/.test
	@rm -rf build/coverage && mkdir -p build/coverage
	$(BIN)/python -m coverage run -m pytest -n $(JOBS) --dist loadgroup --guard-steps off $(MEASURED)
	@$(BIN)/python -m coverage combine -q
	@$(BIN)/python -m coverage json -q -o build/coverage/report.json
	@$(BIN)/python tests/coverage_by_room.py build/coverage/report.json $(ARGS)

# The suite runs on the Python of .venv; tests/test_pythons.py imports what it can on others that are here. This says for
# which of them the package index has the same torch.
pythons: $(VENV)/.setup
	@torch=$$($(BIN)/python -c 'from importlib.metadata import version; print(version("torch").split("+")[0])'); \
	for version in 3.12 3.13; do \
		said=$$($(BIN)/python -m pip install --dry-run --ignore-installed --no-deps --only-binary=:all: \
			--python-version $$version --target build/none "torch==$$torch" 2>&1) \
		&& said="the package index has torch $$torch: make test VENV=.venv-$$version PYTHON=python$$version" \
		|| said="the package index has no torch $$torch for it, or cannot be reached: the suite is not run on it"; \
		echo "Python $$version: $$said"; \
	done

# Many seeds of the simulator: make sim SEEDS=20000
SEEDS ?= 2000
sim: $(VENV)/.test
	PYTHONPATH=tests $(BIN)/python -m simulation.run --seeds $(SEEDS) $(ARGS)

# One protection of the engine taken away at a time; prints the table of docs/evidence/proof.md;
# ARGS="--out docs/measurements/mutation.json" keeps it
mutation: $(VENV)/.test
	PYTHONPATH=tests $(BIN)/python -m mutation.run --seeds $(SEEDS) $(ARGS)

# Processes of running services killed with SIGKILL, over and over; prints the table of docs/evidence/proof.md
kills: $(VENV)/.test
	PYTHONPATH=tests $(BIN)/python -m kills.run $(ARGS)

# The C++ kernels on ARM, and on x86-64 without AVX-512 and AVX, played by qemu (Debian: qemu-user,
# g++-aarch64-linux-gnu)
qemu: $(VENV)/.test
	GAPLESS_QEMU=1 $(BIN)/python -m pytest -n $(JOBS) tests/kernels/test_native_qemu.py tests/comm/test_ranks_alone.py $(ARGS)

# The wheel with its C++ compiled, into dist/, for this machine or MACHINE=aarch64 (Debian: g++-aarch64-linux-gnu), and
# for the Pythons whose headers are here
PYTHONS ?= $(BIN)/python $(wildcard $(HOME)/.pyenv/versions/3.1[23].*/bin/python)
wheel: $(VENV)/.setup
	$(BIN)/python deploy/wheel.py $(if $(MACHINE),--machine $(MACHINE)) --python $(PYTHONS) $(ARGS)

# A bare environment without a compiler: that wheel installed, served from, and asked; prints the seconds
wheel-serves: $(VENV)/.test
	GAPLESS_WHEEL="$$(ls -t $(CURDIR)/dist/gapless-*.whl | head -n 1)" \
		$(BIN)/python -m pytest -n0 -s tests/cli/test_wheel_serves.py $(ARGS)

# The manual, into build/site; tables and reference pages are written again first
docs: $(VENV)/.docs
	$(BIN)/python docs/_site/tables.py
	$(BIN)/python docs/_site/reference.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open build/site/index.html, or, with search: $(BIN)/mkdocs serve"

clean:
	rm -rf $(VENV) $(NEWEST) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The first of these that is 3.11 or later, can make environments, and was built with its optimizations, as pyenv does not
# do by default: imports and tests take longer without. If there is none, without. `make setup PYTHON=...` names another.
# Where none is, uv can bring one.
USABLE = import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
FAST = from gapless.base.host import is_python_optimized; exit(not is_python_optimized())
$(BIN)/python:
	@for also in '$(FAST)' pass; do \
		for p in $(or $(PYTHON),python3 /usr/bin/python3 python3.11 python3.12 python3.13 python); do \
			if $$p -c '$(USABLE)' >/dev/null 2>&1 && $$p -c "$$also" >/dev/null 2>&1; then \
				echo "making $(VENV) with $$p, $$($$p --version)"; exec $$p -m venv $(VENV); \
			fi; \
		done; \
	done; \
	test -z "$(UV)" || exec $(UV) venv --seed $(VENV); \
	echo "gapless needs Python 3.11 or later with the venv module (on Debian: the package python3-venv)." >&2; \
	echo "Found: $$(python3 --version 2>&1 || echo no python3). Name another one: make setup PYTHON=/path/to/python" >&2; \
	exit 1

$(BIN)/.installer: | $(BIN)/python
	@test -n "$(UV)" || $(PIP) install --quiet -c constraints.txt uv || echo "no uv: pip installs, which takes longer"
	@touch $@

# torch first: many packages name it unpinned and would bring another build.
$(VENV)/.setup: pyproject.toml constraints.txt | $(BIN)/.installer
	@echo "installing the packages of constraints.txt"
	@$(call INSTALL,torch==2.13.0)
	@$(call INSTALL,-e .)
	@touch $@

$(VENV)/.docs: $(VENV)/.setup
	@$(call INSTALL,-e '.[docs]')
	@touch $@

$(VENV)/.test: $(VENV)/.setup
	@$(call INSTALL,-e '.[dev]')
	@touch $@
