# Each target first installs what it needs into .venv: demo the command, the others the rest too.
BIN := .venv/bin
LAB := .venv/.lab
DEV := .venv/.dev
CMAKE := $(firstword $(wildcard $(BIN)/cmake) cmake)
# A file's tests share fixtures and compiled kernels, so one process runs them all.
PARALLEL := -n 2 --dist loadfile
QUICK := -m "not slow" --hypothesis-profile quick
KERNELS := src/mirrorhead/native/kernels.so
.DEFAULT_GOAL := help
.PHONY: help demo test quick docs docs-serve bench matrix lint format native sanitize

help:
	@echo "make demo    set up, then run the paper's experiments and write out/report.html"
	@echo "make test    set up, then lint, types and all tests"
	@echo "make quick   lint, and the quick tests (under 90 s)"
	@echo "make docs    build the documentation into out/docs"
	@echo "make bench   print the benchmark tables"
	@echo "make matrix  test the library with the oldest packages it accepts"
	@echo "make format  let ruff fix what it can"
	@echo "make native  build the C library in place (no set-up; seconds)"

$(LAB): pyproject.toml lab/pyproject.toml constraints.txt scripts/setup
	bash scripts/setup lab
	@touch $@

$(DEV): pyproject.toml lab/pyproject.toml constraints.txt scripts/setup
	bash scripts/setup dev
	@touch $(LAB) $@

# Setting up builds the C library; this builds it again when its sources are newer.
$(KERNELS): $(wildcard src/mirrorhead/native/*.c src/mirrorhead/native/*.h) cmake/CMakeLists.txt | $(LAB)
	@if command -v $(CMAKE) >/dev/null; then $(MAKE) -s native; fi

native:
	@$(CMAKE) -S cmake -B build/native >/dev/null
	@$(CMAKE) --build build/native -- --no-print-directory -s

# The tests of the three kernels with the address and undefined-behaviour sanitizers, in place.
sanitize: $(DEV)
	@$(CMAKE) -S cmake -B build/sanitize -DSANITIZE=ON >/dev/null
	@$(CMAKE) --build build/sanitize -- --no-print-directory -s
	LD_PRELOAD="$$(cc -print-file-name=libasan.so) $$(cc -print-file-name=libubsan.so)" \
	    ASAN_OPTIONS=detect_leaks=0 $(BIN)/python -m pytest -q -s -p no:cacheprovider \
	    tests/library/test_native_step.py tests/library/test_margin_compiled.py \
	    tests/library/test_descent.py; result=$$?; rm -f $(KERNELS); $(MAKE) -s native; exit $$result

demo: $(LAB) $(KERNELS)
	$(BIN)/mirrorhead reproduce --out out

lint: $(DEV) $(KERNELS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# The library's tests run as if the lab were not installed (tests/conftest.py).
test: lint
	$(BIN)/python -m pytest -q $(PARALLEL)
	cd lab && ../$(BIN)/python -m pytest -q $(PARALLEL)

quick: $(DEV) $(KERNELS)
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -q $(PARALLEL) $(QUICK)
	cd lab && ../$(BIN)/python -m pytest -q $(PARALLEL) $(QUICK)

docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "documentation: out/docs/index.html (search needs a server: make docs-serve)"

docs-serve: docs
	$(BIN)/python -m http.server --directory out/docs 8000

bench: $(DEV) $(KERNELS)
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/margin.py
	$(BIN)/python benchmarks/paths.py
	$(BIN)/python benchmarks/training.py

matrix:
	bash scripts/matrix $(TORCH)

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
