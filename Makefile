# Each target first installs what it needs into .venv: demo the command, the others the rest too.
BIN := .venv/bin
LAB := .venv/.lab
DEV := .venv/.dev
.DEFAULT_GOAL := help
.PHONY: help demo test quick bench lint format

help:
	@echo "make demo    set up, then run the paper's experiments and write out/report.html"
	@echo "make test    set up, then lint, types and all tests"
	@echo "make quick   lint, and the quick tests (under 90 s)"
	@echo "make bench   print the benchmark tables"
	@echo "make format  let ruff fix what it can"

$(LAB): pyproject.toml constraints.txt scripts/setup
	bash scripts/setup lab
	@touch $@

$(DEV): pyproject.toml constraints.txt scripts/setup
	bash scripts/setup dev
	@touch $(LAB) $@

demo: $(LAB)
	$(BIN)/mirrorhead reproduce --out out

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

test: lint
	$(BIN)/python -m pytest -q -n 2

quick: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -q -n 2 -m "not slow"

bench: $(DEV)
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/margin.py
	$(BIN)/python benchmarks/paths.py
	$(BIN)/python benchmarks/training.py

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
