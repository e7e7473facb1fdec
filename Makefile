# make demo | test | quick | bench | format; each sets up .venv first, if need be.
BIN := .venv/bin
STAMP := .venv/.ready
.DEFAULT_GOAL := help
.PHONY: help demo test quick bench lint format

help:
	@echo "make demo    set up, then run the paper's experiments and write out/report.html"
	@echo "make test    set up, then lint, types and all tests"
	@echo "make quick   lint, and the tests that take moments (under 90 s)"
	@echo "make bench   set up, then print the benchmark tables"
	@echo "make format  let ruff mend what it can"

$(STAMP): pyproject.toml constraints.txt scripts/setup
	bash scripts/setup
	@touch $@

demo: $(STAMP)
	$(BIN)/mirrorhead reproduce --out out

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

test: lint
	$(BIN)/python -m pytest -q -n 2

quick: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -q -n 2 -m "not slow"

bench: $(STAMP)
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/margin.py
	$(BIN)/python benchmarks/paths.py
	$(BIN)/python benchmarks/training.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
