"""How the C library is found, chosen, refused and built."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import mirrorhead as mh
from mirrorhead import native
from mirrorhead.margin import _compiled
from mirrorhead.synthetic import random_problem

REPOSITORY = Path(__file__).parents[2]
needs_library = pytest.mark.skipif(not native.available(), reason="the C library was not built")


@pytest.fixture
def fresh() -> Iterator[None]:
    """Look for the library again, before the test and after it."""
    caches = (
        native._load,
        native._warn,
        _compiled._solver,
        _compiled._cones,
        _compiled._lapack_is_known,
    )
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def in_new_process(script: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


@needs_library
def test_a_lower_instruction_set_can_be_asked_for() -> None:
    script = "import mirrorhead as mh; print(mh.native.available(), mh.native.instruction_set())"
    assert in_new_process(script, MIRRORHEAD_NATIVE="").startswith("True")
    assert in_new_process(script, MIRRORHEAD_NATIVE="baseline") == "True baseline\n"
    assert in_new_process(script, MIRRORHEAD_NATIVE="off") == "False None\n"
    assert "MIRRORHEAD_NATIVE must be one of" in in_new_process(script, MIRRORHEAD_NATIVE="mmx")


@needs_library
@pytest.mark.parametrize("name", ["baseline", "avx2", "avx512"])
def test_every_instruction_set_solves_alike(name: str, fresh, monkeypatch) -> None:
    library, _ = native._load()
    assert library is not None
    if name not in library.usable_sets().decode().split():
        pytest.skip(f"this processor has no {name}")
    monkeypatch.setenv("MIRRORHEAD_NATIVE", name)
    problem = random_problem(5)
    solution = mh.attention_svm(problem.X, problem.z, mh.globally_optimal_tokens(problem), 1.5)
    assert solution.optimal.all()


def test_without_the_library_there_is_one_warning(fresh, monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("MIRRORHEAD_NATIVE", raising=False)
    monkeypatch.setattr(native, "_LIBRARY", tmp_path / "kernels.so")
    problem = random_problem(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not native.available()
        assert caught == []
        for p in (1.5, 3.0):
            tokens = mh.globally_optimal_tokens(problem)
            assert mh.attention_svm(problem.X, problem.z, tokens, p).optimal.all()
    assert ["was not built: torch computes instead" in str(w.message) for w in caught] == [True]


@pytest.mark.parametrize("content", [b"", b"not a library"])
def test_a_damaged_library_is_not_used(content: bytes, fresh, monkeypatch, tmp_path) -> None:
    (tmp_path / "kernels.so").write_bytes(content)
    monkeypatch.setattr(native, "_LIBRARY", tmp_path / "kernels.so")
    monkeypatch.delenv("MIRRORHEAD_NATIVE", raising=False)
    assert not native.available()
    with pytest.warns(UserWarning, match="could not be loaded"):
        assert native.function("solve_margins", []) is None


@needs_library
def test_a_library_older_than_its_sources_is_not_used(fresh, monkeypatch, tmp_path) -> None:
    shutil.copy(native._LIBRARY, tmp_path)
    for source in native._FOLDER.glob("*.[ch]"):
        (tmp_path / source.name).write_bytes(source.read_bytes() + b"\n")
    monkeypatch.setattr(native, "_LIBRARY", tmp_path / native._LIBRARY.name)
    monkeypatch.setattr(native, "_FOLDER", tmp_path)
    with pytest.warns(UserWarning, match="is older than its C sources"):
        assert native.function("solve_margins", []) is None


def test_the_build_succeeds_without_a_compiler(tmp_path) -> None:
    # CMake also looks into the system's folders, so PATH alone would not hide a compiler.
    environment = {**os.environ, "CC": str(tmp_path / "no-compiler")}
    configure = ["cmake", "-S", str(REPOSITORY / "cmake"), "-B", str(tmp_path)]
    for command in ([*configure, f"-DOUTPUT={tmp_path}"], ["cmake", "--build", str(tmp_path)]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        if command[1] == "-S":
            assert "No C compiler was found" in done.stderr
    assert list(tmp_path.glob("*.so")) == []
