# Everything to be done with Tailrace's source. `make help` lists the targets.
#
# Needs Python 3.11 or later, bash and make. The rest comes into .venv, in the versions of requirements.lock.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input

# Options that reach the commands: make demo ARGS="--keep-running", make test ARGS="-k resume".
ARGS ?=
# Test processes: many tests wait for elections, time-outs and other processes, and six of them keep two cores busy.
PROCESSES ?= 6
SEED ?= 1
SEEDS ?=
SECONDS ?=
OPS ?= 2000
N ?= 300
# What a fuzz run does with the compiled kernel: auto, on, off.
KERNEL ?= auto

# Bytecode is kept even where the environment turns that off, as container images do: a run of the tests starts some
# hundred processes, and compiling what they import takes a quarter of a second of processor for each, and 12 s for each
# of those that collect the tests.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo quick test test-landing test-slow test-7.0 test-version test-whole lint style format fuzz fuzz-expressions fuzz-images fuzz-sharded fuzz-gateway fuzz-products fuzz-sync compare-honest gateway-siege kills simulate-consumers mutants record bench bench-page pictures site site-serve lock dist images test-dependencies clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9.-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(INSTALLED) ## a real MongoDB, Spark and a lake of exact change events, in a few minutes
	$(BIN)/tailrace demo $(ARGS)

# $(1): what -m takes.
define suite
$(BIN)/mypy --strict src &
types=$$!
result=0
$(BIN)/python -m tests.prepare
$(BIN)/python -m pytest -m "$(1)" -n $(PROCESSES) --dist loadfile --no-loadscope-reorder $(ARGS) || result=$$?
[ $$result != 1 ] || ! $(BIN)/python -m tests.again || result=0
wait $$types || result=$$?
exit $$result
endef

test: export TAILRACE_TESTS := quick
test: style ## format and lint, the tests that are neither heavy nor slow, and the check of types
	$(call suite,not slow and not heavy)

test-landing: style ## the same with the heavy tests: what .ci/run runs, before a change lands
	$(call suite,not slow)

# These tests compute and do not wait: a process for each core, and the longest files first in all of them. What is long,
# what is heavy, and what needs a server is left to the others.
OFFLINE := unit property golden tidy

quick: style ## the tests that need no server and no Spark, for while you work; ARGS="-k token"
	$(BIN)/python -m tests.prepare --offline
	TAILRACE_TESTS=quick $(BIN)/python -m pytest -m "not slow and not heavy and not long and not mongod and not spark" -n auto --dist loadfile --no-loadscope-reorder $(addprefix tests/,$(OFFLINE)) $(ARGS)

test-slow: $(INSTALLED) ## the slow tests, which make test-landing leaves out: takes hours; ARGS="-k spark"
	$(BIN)/python -m tests.prepare
	$(BIN)/python -m pytest -m slow -n $(PROCESSES) --dist loadfile --no-loadscope-reorder $(ARGS)

# What is compared with a live server, on another version of it: make test-7.0, or make test-version VERSION=5.0.4.
VERSION ?= 7.0.28
ON_A_SERVER := golden differential sharded gateway spec consumer compare snapshot tables/test_equality.py embedded/test_wine.py sync/test_at_rest.py

test-7.0: ## the tests that compare with a live server, on mongod 7.0.28 (needs wine64); VERSION=7.0.25
	@$(MAKE) --no-print-directory test-version VERSION=$(VERSION) ARGS="$(ARGS)"

test-version: $(INSTALLED) ## the same on any version; VERSION=5.0.4
	$(BIN)/python -m tests.prepare
	export TAILRACE_MONGOD
	TAILRACE_MONGOD=$$($(BIN)/python -c 'import sys; from tailrace.embedded import find_mongod; print(find_mongod(sys.argv[1]).path)' $(VERSION))
	$(BIN)/python -m pytest -m "not slow" -n $(PROCESSES) --dist loadfile --no-loadscope-reorder $(addprefix tests/,$(ON_A_SERVER)) $(ARGS)

test-whole: $(INSTALLED) ## all tests, the slow ones too, with as many random examples as they have: takes hours
	$(BIN)/python -m tests.prepare
	TAILRACE_TESTS=whole $(BIN)/python -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder $(ARGS)

lint: style ## ruff (format and lint), who may import whom, and mypy --strict, without changing anything
	$(BIN)/mypy --strict src

style: $(INSTALLED)
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	imports=$$(cd src && ../$(BIN)/lint-imports ../pyproject.toml --no-cache) || { echo "$$imports"; exit 1; }

format: $(INSTALLED) ## format the code and fix what ruff can fix by itself
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

fuzz: $(INSTALLED) ## random workloads against a live mongod; SEED=n OPS=n replays a case, KERNEL=off runs without compiled code
	$(BIN)/python -m tests.differential.fuzz $(if $(SEEDS),--seeds $(SEEDS),--seed $(SEED)) --operations $(OPS) --kernel $(KERNEL) $(ARGS)

fuzz-expressions: $(INSTALLED) ## random pipelines against a live mongod; SEED=n N=n replays a case
	$(BIN)/python -m tests.differential.fuzz_expressions --seed $(SEED) --n $(N) $(ARGS)

fuzz-images: $(INSTALLED) ## random updates against a live mongod, each document compared with ours; SEED=n or SEEDS=a-b, ARGS="--version 4.4.2"
	$(BIN)/python -m tests.differential.fuzz_images $(if $(SEEDS),--seeds $(SEEDS),--seed $(SEED)) $(ARGS)

fuzz-sharded: $(INSTALLED) ## random writes on a live sharded cluster while chunks move and shards come and go; SEED=n or SEEDS=a-b, KERNEL=off
	$(BIN)/python -m tests.sharded.fuzz $(if $(SEEDS),--seeds $(SEEDS),--seed $(SEED)) --kernel $(KERNEL) $(ARGS)

fuzz-gateway: $(INSTALLED) ## damaged frames of the wire protocol; SEED=n, ARGS="--cases n", ARGS=--atheris where it is installed
	$(BIN)/python -m tests.gateway.fuzz --seed $(SEED) $(ARGS)

fuzz-products: $(INSTALLED) ## everything that is built on the stream, compared with the server while a saboteur does harm; SEED=n or SEEDS=a-b, ARGS="--version 5.0.4 --products tables,archive"
	$(BIN)/python -m tests.products $(if $(SEEDS),--seeds $(SEEDS),--seed $(SEED)) $(ARGS)

fuzz-sync: $(INSTALLED) ## random workloads on a source that is copied and followed, both ends compared; SEED=n or SEEDS=a-b, ARGS="--version 5.0.4 --to-version 6.0.27"
	$(BIN)/python -m tests.sync.fuzz $(if $(SEEDS),--seeds $(SEEDS),--seed $(SEED)) $(ARGS)

compare-honest: $(INSTALLED) ## random honest writes, in which tailrace compare has to find nothing; ARGS="--seconds 3600 --version 7.0.28"
	$(BIN)/python -m tests.compare.honest $(ARGS)

kills: $(INSTALLED) ## SIGKILL at 50 random moments to everything that reads a deployment; SEED=n, ARGS="--kills 10 --parts lake --version 5.0.4"
	$(BIN)/python -m tests.kills --seed $(SEED) $(ARGS)

gateway-siege: $(INSTALLED) ## hostile tenants beside an honest client, through one gateway; SECONDS=3600
	$(BIN)/python -m tests.gateway.siege $(if $(SECONDS),--seconds $(SECONDS)) $(ARGS)

simulate-consumers: $(INSTALLED) ## listeners under a seeded scheduler that pauses, kills and loses; SEEDS=a-b, ARGS="--seed n" replays
	$(BIN)/python -m tests.simulation $(if $(SEEDS),--seeds $(SEEDS)) $(ARGS)

mutants: $(INSTALLED) ## faults planted one at a time in stages, plan, events and the rules of listeners: which does no test notice? ARGS="--places core/plan --sample 100"
	$(BIN)/python -m tests.mutants $(ARGS)

record: $(INSTALLED) ## record the golden workloads again from a live server
	$(BIN)/python -m tests.golden.record $(ARGS)

bench: $(INSTALLED) ## run every benchmark but bench/cluster.py, which takes an hour; each prints both sides and their ratio
	@for question in $(filter-out bench/page.py bench/cluster.py,$(wildcard bench/*.py)); do
		echo "== $$question"
		$(BIN)/python "$$question" $(ARGS)
	done

bench-page: $(INSTALLED) ## the page of benchmarks, docs/reference/benchmarks.md; an hour, or minutes: ARGS=--quick
	$(BIN)/python bench/page.py $(ARGS)

# MkDocs warns at each start of a second version that is not out.
site site-serve: export NO_MKDOCS_2_WARNING := 1

pictures: $(INSTALLED) ## the pictures of the page about the console, made anew with this machine's Chromium; ARGS="--seconds 20 --into /tmp"
	$(BIN)/python -m tests.console.pictures $(ARGS)

site: $(INSTALLED) ## the documentation as a site, with the reference of Python and of the commands: build/site
	$(BIN)/mkdocs build --strict $(ARGS)

site-serve: $(INSTALLED) ## the same at http://127.0.0.1:8000, built anew when a page or a docstring changes
	$(BIN)/mkdocs serve --livereload $(ARGS)

lock: ## write the lock files again from pyproject.toml; pins stay where they still fit
	@$(find_python)
	"$$python" -m venv --clear $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install --quiet uv
	resolve="$(VENV)-lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate"
	$$resolve --all-extras --output-file requirements.lock pyproject.toml
	echo "setuptools>=77" | $$resolve --output-file requirements-build.lock -
	$$resolve --output-file release/requirements.lock release/requirements.in
	$$resolve --all-extras --resolution lowest-direct --output-file release/lowest.lock pyproject.toml
	# The images get the versions that are tested.
	resolve="$$resolve --constraint requirements.lock"
	$$resolve --extra gateway --output-file deploy/container/gateway.lock pyproject.toml
	$$resolve --extra archive --extra metrics --extra tables --output-file deploy/container/stores.lock pyproject.toml
	$$resolve --output-file deploy/container/build.lock release/kernel.in
	rm -rf $(VENV)-lock

dist: ## build what is published, and try it as its users will: wheel, sources, bills of materials; ARGS=--dirty
	@$(find_python)
	"$$python" -m venv --clear $(VENV)-dist
	$(VENV)-dist/bin/python -m pip install --quiet --require-hashes --requirement release/requirements.lock
	$(VENV)-dist/bin/python release/dist.py $(ARGS)

images: $(INSTALLED) ## build the images of deploy/container and use them, read-only and as an unknown user: needs buildah and root; ARGS="--base base.tar --wheel dist/x.whl"
	$(BIN)/python release/image.py $(ARGS)

# VERSIONS=newest takes what there is today. The tests that touch other people's parts; the rest is the same everywhere.
VERSIONS ?= lowest
ON_DEPENDENCIES := unit spec conformance console consumer gateway masks ported snapshot tables
ALL_EXTRAS := archive,console,dev,embedded,gateway,iceberg,icu,images,kafka,masks,metrics,nats,redis,s3,schema-registry,spark,tables
test-dependencies: ## the client, the command line, the stores and the gateway on the lowest dependencies; VERSIONS=newest
	@$(find_python)
	"$$python" -m venv --clear $(VENV)-$(VERSIONS)
	pip="$(VENV)-$(VERSIONS)/bin/python -m pip --disable-pip-version-check --no-input"
	if [ $(VERSIONS) = newest ]; then
		$$pip install --quiet --upgrade setuptools
		$$pip install --quiet --upgrade --upgrade-strategy eager --editable ".[$(ALL_EXTRAS)]"
	else
		$$pip install --quiet --require-hashes --requirement requirements-build.lock
		$$pip install --quiet --no-build-isolation --require-hashes --requirement release/lowest.lock
		$$pip install --quiet --no-build-isolation --no-deps --editable .
	fi
	$(VENV)-$(VERSIONS)/bin/python -m tests.prepare
	$(VENV)-$(VERSIONS)/bin/python -m pytest -m "not slow" -n $(PROCESSES) --dist loadfile --no-loadscope-reorder $(addprefix tests/,$(ON_DEPENDENCIES)) $(ARGS)

clean: ## remove everything that the targets made, .venv included
	rm -rf $(VENV) $(VENV)-dist $(VENV)-lock $(VENV)-lowest $(VENV)-newest .mutants build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

# Sets $python to a Python that is new enough. One that is named but does not run (a version manager's shim) is no match.
# make PYTHON=/path/to/python chooses another.
define find_python
python=""
for candidate in $(PYTHON) python3.11 python3.12 python3.13 python3.14 python3 python; do
	if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
		python=$$candidate
		break
	fi
done
if [ -z "$$python" ]; then
	echo "Tailrace needs Python 3.11 or later with its venv module, and found none on PATH. Install one, or name it: make PYTHON=/path/to/python" >&2
	exit 1
fi
endef

# The stamp is written last, so an installation that was cut short is done again.
# --no-build-isolation: what builds the source packages is locked too.
$(INSTALLED): requirements.lock requirements-build.lock pyproject.toml
	@$(find_python)
	echo "Setting up $(VENV) with $$("$$python" --version): a minute or two"
	"$$python" -m venv --clear $(VENV)
	$(PIP) install --quiet --require-hashes --requirement requirements-build.lock
	$(PIP) install --quiet --no-build-isolation --require-hashes --requirement requirements.lock
	$(PIP) install --quiet --no-build-isolation --no-deps --editable .
	touch $@
