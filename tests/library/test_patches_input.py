"""Bad input to patches: a clear error, and models and files as they were."""

from __future__ import annotations

import json
import resource
import stat
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import mirrorhead as mh
from mirrorhead.patches import checkpoints
from mirrorhead.patches.checkpoints import bits
from mirrorhead.patches.file_format import decode_gaps, positions
from patch_cases import State, copy_of, same_bits, sharded_folder, small_state, tuned_from


@pytest.fixture
def base() -> State:
    return small_state()


@pytest.fixture
def patch(base: State) -> mh.Patch:
    return mh.Patch.between(base, tuned_from(base), keep=0.2)


class TestBetween:
    @pytest.mark.parametrize("keep", [0, -0.1, 1.5, 1 + 2**-52, float("nan"), True, "0.1"])
    def test_keep(self, base: State, keep: float) -> None:
        with pytest.raises(ValueError, match=r"keep must be above 0 and at most 1"):
            mh.Patch.between(base, base, keep=keep)

    @pytest.mark.parametrize(
        ("size", "words"),
        [
            ({"count": 0}, "count must be a whole number of at least 1"),
            ({"count": True}, "count must be a whole number"),
            ({"tolerance": True}, "tolerance must be finite and at least 0"),
            ({"count": 1.5}, "count must be a whole number"),
            ({"tolerance": -1.0}, "tolerance must be finite and at least 0"),
            ({"tolerance": float("nan")}, "tolerance must be finite"),
            ({"max_bytes": "2 furlongs"}, "max_bytes must be"),
            ({"max_bytes": "9" * 400 + " furlongs"}, "max_bytes must be"),
            ({"max_bytes": 0}, "max_bytes must be at least 1"),
            ({"keep": 0.5, "count": 3}, "only one of"),
        ],
    )
    def test_other_sizes(self, base: State, size: dict[str, Any], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            mh.Patch.between(base, base, **size)

    def test_random(self, base: State) -> None:
        tuned = {name: t + 1 for name, t in base.items()}
        sizes: list[dict[str, Any]] = [{}, {"count": 3}, {"tolerance": 0.1}, {"max_bytes": "1 MB"}]
        for size in sizes:
            with pytest.raises(ValueError, match="random=True needs keep"):
                mh.Patch.between(base, tuned, random=True, **size)
        with pytest.raises(ValueError, match="seed must be an integer from 0"):
            mh.Patch.between(base, tuned, keep=0.1, random=True, seed=-1)
        near, far = ({"w": torch.full((1000,), value).half()} for value in (0.0, 6e4))
        with pytest.raises(mh.PatchError, match=r"divided by 0\.01, overflows"):
            mh.Patch.between(near, far, keep=0.01, random=True)

    @pytest.mark.parametrize("whole", ["zzz", ["*.bias", "head.*"]])
    def test_a_pattern_that_matches_nothing(self, base: State, whole: Any) -> None:
        with pytest.raises(
            mh.PatchError, match=r"whole has '.*', which matches no tensor; names are"
        ):
            mh.Patch.between(base, tuned_from(base), whole=whole)

    @pytest.mark.parametrize("whole", [5, ["*.bias", 5], None])
    def test_what_is_no_pattern(self, base: State, whole: Any) -> None:
        with pytest.raises(TypeError, match=r"whole must be a pattern .*, got .*(5|None)"):
            mh.Patch.between(base, tuned_from(base), whole=whole)

    def test_a_header_that_is_larger_than_max_bytes(self, base: State) -> None:
        with pytest.raises(mh.PatchError, match="the header alone need"):
            mh.Patch.between(base, tuned_from(base), max_bytes=50)

    def test_missing_extra_and_misfit_tensors_are_all_named(self, base: State) -> None:
        tuned = tuned_from(base)
        del tuned["scale"]
        tuned["new"] = torch.ones(1)
        tuned["layer.0.bias"] = tuned["layer.0.bias"].half()
        with pytest.raises(mh.PatchError) as caught:
            mh.Patch.between(base, tuned)
        for words in ("no tensor 'scale'", "no tensor 'new'", "F32 [6] in base, F16 [6] in tuned"):
            assert words in str(caught.value)

    @pytest.mark.parametrize("side", ["base", "tuned"])
    def test_nan(self, base: State, side: str) -> None:
        states = {"base": base, "tuned": tuned_from(base)}
        states[side]["layer.1.weight"][1, 1] = float("nan")
        with pytest.raises(mh.PatchError, match=rf"{side}: tensor 'layer.1.weight' contains NaN"):
            mh.Patch.between(states["base"], states["tuned"])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
    @pytest.mark.parametrize("whole", [(), "w"])
    @pytest.mark.parametrize("originals", [True, False])
    def test_nan_that_stays_is_no_change(
        self, dtype: torch.dtype, whole: Any, originals: bool, tmp_path: Path
    ) -> None:
        nan, inf = float("nan"), float("inf")
        base = {"w": torch.tensor([nan, -inf, 1.0, 2.0]).to(dtype), "x": torch.ones(2)}
        tuned = {"w": torch.tensor([nan, -inf, 1.0, 4.0]).to(dtype), "x": torch.zeros(2)}
        patch = mh.Patch.between(base, tuned, whole=whole)
        assert patch.largest(9)[0] == ("w", (3,), 2.0, 4.0)
        assert [row[3] for row in patch.layers()] == [2.0, 1.0]
        patch.save(tmp_path / "p", originals=originals)
        read = mh.Patch.load(tmp_path / "p")
        state = copy_of(base)
        read.apply(state)
        assert same_bits(state, tuned)
        patch.revert(state)
        assert same_bits(state, base)
        mh.Patch.merge([patch, patch], "mean", base=base).apply(state)
        assert same_bits(state, tuned)
        if dtype == torch.float32:
            change = patch.to_state_dict()["w"].to_dense()
            assert torch.equal(change, torch.tensor([0.0, 0.0, 0.0, 2.0]))

    @pytest.mark.parametrize("whole", [(), "w"])
    def test_a_change_to_or_from_nan(self, whole: Any, tmp_path: Path) -> None:
        fine, bad = {"w": torch.ones(3)}, {"w": torch.tensor([1.0, float("nan"), 1.0])}
        other = {"w": bits(bad["w"]).add(torch.tensor([0, 1, 0])).int().view(torch.float32)}
        for base, tuned, side in (
            (fine, bad, "tuned"), (bad, fine, "base"), (bad, other, "base"),
        ):  # fmt: skip
            with pytest.raises(
                mh.PatchError, match=f"{side}: tensor 'w' contains NaN that changes"
            ):
                mh.Patch.between(base, tuned, whole=whole)

    def test_infinity(self, base: State) -> None:
        tuned = copy_of(base)
        tuned["scale"].fill_(float("inf"))
        with pytest.raises(mh.PatchError, match="infinity"):
            mh.Patch.between(base, tuned)
        base["scale"].fill_(float("inf"))  # an infinity that stays is no change
        assert mh.Patch.between(base, tuned).count == 0

    @pytest.mark.parametrize("size", [{}, {"keep": 0.1}])
    def test_a_base_that_was_trained_too(self, size: dict[str, Any]) -> None:
        model = nn.Linear(3, 2)
        base = model.state_dict()  # not a copy
        model.weight.data += 1
        with pytest.raises(mh.PatchError, match="the same tensors in memory"):
            mh.Patch.between(base, model, **size)
        # A frozen encoder and a new head are in order.
        state = base | {"head": torch.ones(2)}
        assert mh.Patch.between(model, state, whole="head").count == 2
        # Tensors without numbers have no memory to share.
        assert mh.Patch.between({"w": torch.zeros(0)}, {"w": torch.zeros(0)}, **size).count == 0

    def test_things_that_are_no_checkpoint(self, base: State, tmp_path: Path) -> None:
        with pytest.raises(TypeError, match="tuned must be a model, a state dict, or the path"):
            mh.Patch.between(base, 3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="'w' is a int, not a tensor"):
            mh.Patch.between({"w": 3}, base)  # type: ignore[dict-item]
        with pytest.raises(mh.PatchError, match="meta device"):
            mh.Patch.between(nn.Linear(2, 2, device="meta"), base)
        with pytest.raises(mh.PatchError, match="does not exist"):
            mh.Patch.between(tmp_path / "nothing", base)
        with pytest.raises(mh.PatchError, match=r"neither model\.safetensors nor"):
            mh.Patch.between(tmp_path, base)
        (tmp_path / "model.safetensors").write_bytes(b"no header here")
        with pytest.raises(mh.PatchError, match="cannot be read as a safetensors file"):
            mh.Patch.between(tmp_path, base)
        (tmp_path / "model.safetensors.index.json").write_text('["w"]')
        with pytest.raises(mh.PatchError, match='has no "weight_map" from tensors to files'):
            mh.Patch.between(tmp_path, base)

    @pytest.mark.parametrize("name", ["../outside.safetensors", "gone.safetensors", 7])
    def test_an_index_that_leads_elsewhere(self, base: State, tmp_path: Path, name: Any) -> None:
        index = {"weight_map": {"w": name}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(mh.PatchError, match=r"not a file name|is missing"):
            mh.Patch.between(tmp_path, base)


class TestSave:
    def test_only_a_patch_is_overwritten(
        self, base: State, patch: mh.Patch, tmp_path: Path
    ) -> None:
        save_file(base, tmp_path / "model.safetensors")
        (tmp_path / "notes").write_text("mine")
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        for path in before:
            with pytest.raises(mh.PatchError, match=rf"{path.name} exists and is not a patch"):
                patch.save(path)
        with pytest.raises(mh.PatchError, match="must be the path of a file, got the folder"):
            patch.save(tmp_path)
        with pytest.raises(FileNotFoundError, match="missing"):
            patch.save(tmp_path / "missing" / "p")
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
        patch.save(tmp_path / "p")
        patch.without("layer.*").save(tmp_path / "p")
        assert not mh.Patch.load(tmp_path / "p").tensors


class TestForeignFiles:
    """Files and folders of other programs: what they are, and what to do."""

    @pytest.mark.slow
    @pytest.mark.parametrize("old", [False, True])
    @pytest.mark.parametrize("folder", [False, True])
    def test_the_code_that_the_error_shows_converts_a_pytorch_file(
        self, old: bool, folder: bool, base: State, tmp_path: Path
    ) -> None:
        path = tmp_path / ("pytorch_model.bin" if folder else "it's.pt")
        tied = base | {"tied": base["layer.0.weight"], "turned": torch.randn(3, 2).t()}
        torch.save(tied, path, _use_new_zipfile_serialization=not old)
        target = tmp_path if folder else path
        with pytest.raises(mh.PatchError, match=r"only safetensors files and .* are read") as found:
            mh.Patch.between(target, tied)
        done = subprocess.run(
            [sys.executable, "-c", str(found.value).partition("Convert it in Python: ")[2]],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        read = tmp_path if folder else tmp_path / "it's.safetensors"
        assert mh.Patch.between(read, copy_of(tied)).count == 0

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"", "is empty"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
            (b"GGUF\x03" + bytes(90), "is a GGUF file; only safetensors files"),
            (b"\x89HDF\r\n\x1a\n" + bytes(90), "is an HDF5 file"),
            (b"PK\x03\x04" + bytes(90), "is a zip archive"),
            (b"\n<!DOCTYPE html>" + bytes(90), "is a web page or XML"),
            (b'{"weights": 1}', "is JSON"),
            (b"any other content", "cannot be read as a safetensors file: "),
        ],
    )
    def test_it_is_said_what_the_file_is(
        self, content: bytes, words: str, base: State, tmp_path: Path
    ) -> None:
        file = tmp_path / "model"
        file.write_bytes(content)
        for read in (lambda: mh.Patch.load(file), lambda: mh.Patch.between(file, base)):
            with pytest.raises(mh.PatchError, match=words) as found:
                read()
            assert str(file) in str(found.value)

    def test_paths_that_are_no_files(self, base: State, tmp_path: Path) -> None:
        with pytest.raises(mh.PatchError, match="is a folder; give the path of a file"):
            mh.Patch.load(tmp_path)
        with pytest.raises(mh.PatchError, match="gone does not exist"):
            mh.Patch.load(tmp_path / "gone")
        save_file(base, tmp_path / "adapter_model.safetensors")
        with pytest.raises(mh.PatchError, match=r"but adapter_model\.safetensors; give the path"):
            mh.Patch.between(tmp_path, base)
        (tmp_path / "adapter_config.json").write_text("{}")
        with pytest.raises(mh.PatchError, match="it is an adapter; merge it into its base"):
            mh.Patch.between(tmp_path, base)


def test_arguments_of_other_methods(patch: mh.Patch) -> None:
    with pytest.raises(TypeError, match=r"without must be a pattern .*, got \(5,\)"):
        patch.without(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="count must be an integer >= 0, got -1"):
        patch.largest(-1)
    with pytest.raises(
        TypeError, match=r"patches must be Patch objects, as of Patch\.load, got a str"
    ):
        mh.Patch.merge(["p.safetensors"])  # type: ignore[list-item]


class TestApply:
    def test_another_base(self, base: State, patch: mh.Patch) -> None:
        base["layer.1.weight"][3, 5] += 1e-6  # not even a weight that the patch touches
        before = copy_of(base)
        with pytest.raises(mh.PatchError, match=r"'layer.1.weight' differs from the base"):
            patch.apply(base)
        assert same_bits(base, before)

    def test_new_tensors_need_a_place_in_a_model_and_replace_nothing(
        self, base: State, tmp_path: Path
    ) -> None:
        head = {"head.weight": torch.ones(2, 3)}
        model = nn.Linear(2, 2)
        patch = mh.Patch.between(model, model.state_dict() | head, whole="head.*")
        with pytest.raises(mh.PatchError, match=r"no tensor 'head.weight'; give it that layer"):
            patch.apply(model)
        state = copy_of(model.state_dict()) | {"head.weight": torch.zeros(2, 3)}
        save_file(state, tmp_path / "base.safetensors")
        for target, out in ((state, None), (tmp_path / "base.safetensors", tmp_path / "out")):
            with pytest.raises(mh.PatchError, match=r"has a tensor 'head.weight', which"):
                patch.apply(target, out)
        assert not state["head.weight"].any() and not (tmp_path / "out").exists()
        model.add_module("head", nn.Linear(3, 2, bias=False))
        patch.apply(model)
        assert torch.equal(model.get_parameter("head.weight"), head["head.weight"])

    def test_a_model_whose_state_dict_is_a_copy(self) -> None:
        class Copying(nn.Linear):
            def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
                return copy_of(super().state_dict(*args, **options))

        model = Copying(2, 2)
        patch = mh.Patch.between(model, tuned_from(model.state_dict()))
        with pytest.raises(mh.PatchError, match=r"state_dict\(\) gives a copy of 'bias'"):
            patch.apply(model)

    def test_revert_does_not_remove_a_head_that_was_trained_further(self, tmp_path: Path) -> None:
        state = {"w": torch.zeros(3)}
        patch = mh.Patch.between(state, {"w": torch.ones(3), "head": torch.ones(2)}, whole="head")
        patch.apply(state)
        state["head"] += 1
        save_file(state, tmp_path / "patched")
        for target, out in ((state, None), (tmp_path / "patched", tmp_path / "out")):
            with pytest.raises(mh.PatchError, match="'head' does not hold the patch's values"):
                patch.revert(target, out)
        assert state["head"].tolist() == [2, 2] and state["w"].tolist() == [1, 1, 1]
        patch.without("head").revert(state)
        assert state["w"].tolist() == [0, 0, 0]

    def test_twice(self, base: State, patch: mh.Patch) -> None:
        patch.apply(base)
        before = copy_of(base)
        with pytest.raises(mh.PatchError, match="already patched with this patch"):
            patch.apply(base)
        assert same_bits(base, before)

    def test_another_architecture(self, base: State, patch: mh.Patch) -> None:
        for model in (nn.Linear(2, 2), {**base, "layer.0.weight": torch.zeros(5, 6)}):
            with pytest.raises(mh.PatchError, match="does not fit"):
                patch.apply(model)
        with pytest.raises(mh.PatchError, match=r"F64 \[6, 5\] there, F32 \[6, 5\] in the patch"):
            patch.apply({**base, "layer.0.weight": base["layer.0.weight"].double()})

    def test_revert_of_what_was_not_patched(self, base: State, patch: mh.Patch) -> None:
        with pytest.raises(mh.PatchError, match="does not hold the patch's values"):
            patch.revert(base)

    def test_revert_of_what_was_trained_further(self, base: State, patch: mh.Patch) -> None:
        patch.apply(base)
        index = patch.tensors["layer.0.weight"].index
        assert index is not None
        free = next(i for i in range(30) if i not in index.tolist())
        base["layer.0.weight"].view(-1)[free] += 1
        before = copy_of(base)
        with pytest.raises(mh.PatchError, match="was changed after it was patched"):
            patch.revert(base)
        assert same_bits(base, before)

    def test_verify_of_another_model(self, base: State, patch: mh.Patch) -> None:
        with pytest.raises(mh.PatchError, match="is not the patched one"):
            patch.verify(base)

    def test_out_goes_with_files_alone_and_must_be_new(
        self, base: State, patch: mh.Patch, tmp_path: Path
    ) -> None:
        with pytest.raises(TypeError, match="needs `out`"):
            patch.apply(base, tmp_path / "out")
        file = tmp_path / "base.safetensors"
        save_file(base, file)
        with pytest.raises(TypeError, match="needs `out`"):
            patch.apply(file)
        with pytest.raises(mh.PatchError, match="exists; give the path of a new"):
            patch.apply(file, file)

    @pytest.mark.parametrize("kind", ["file", "folder", "link"])
    @pytest.mark.parametrize("folder", [False, True])
    def test_a_name_that_is_taken_while_the_copy_is_written(
        self, kind: str, folder: bool, base: State, patch: mh.Patch, tmp_path: Path
    ) -> None:
        source = sharded_folder(tmp_path / "base", base) if folder else tmp_path / "base"
        if not folder:
            save_file(base, source)
        out = tmp_path / "out"

        def take(done: int, total: int) -> None:  # as another process may at any moment
            if done < total or out.is_symlink() or out.exists():
                return
            if kind == "file":
                out.write_text("theirs")
            elif kind == "folder":
                out.mkdir()
            else:
                out.symlink_to(tmp_path / "nowhere")

        with pytest.raises(mh.PatchError, match=f"{out} was made by another process meanwhile"):
            patch.apply(source, out, progress=take)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out"]
        assert (
            out.is_symlink()
            or (out.is_file() and out.read_text() == "theirs")
            or (out.is_dir() and not any(out.iterdir()))
        )
        with pytest.raises(mh.PatchError, match="out exists; give the path of a new file"):
            patch.apply(source, out)

    def test_copies_of_other_files_keep_their_modes(
        self, base: State, patch: mh.Patch, tmp_path: Path
    ) -> None:
        source = sharded_folder(tmp_path / "base", base)
        (source / "config.json").chmod(0o600)
        patch.apply(source, tmp_path / "out")
        assert stat.S_IMODE((tmp_path / "out" / "config.json").stat().st_mode) == 0o600

    def test_no_room_on_the_disk(
        self, base: State, patch: mh.Patch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "base.safetensors"
        save_file(base, file)
        full = type("usage", (), {"free": 10})
        monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda path: full)
        for write in (
            lambda: patch.apply(file, tmp_path / "out"),
            lambda: patch.save(tmp_path / "p"),
        ):
            with pytest.raises(mh.PatchError, match="10 are free on the disk"):
                write()
        assert [path.name for path in tmp_path.iterdir()] == ["base.safetensors"]

    def test_a_disk_that_fills_up_leaves_nothing(
        self, base: State, patch: mh.Patch, tmp_path: Path
    ) -> None:
        big = base | {"big": torch.zeros(1 << 16)}
        file = tmp_path / "base.safetensors"
        save_file(big, file)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))
        try:
            with pytest.raises(OSError, match="too large"):
                patch.apply(file, tmp_path / "out")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert [path.name for path in tmp_path.iterdir()] == ["base.safetensors"]


class TestHostileFiles:
    def altered(self, patch: mh.Patch, tmp_path: Path, change: Any) -> Path:
        """The patch's file with its JSON record or its stored tensors changed."""
        from safetensors import safe_open

        file = tmp_path / "patch.safetensors"
        patch.save(file)
        with safe_open(file, framework="pt") as opened:
            content = json.loads(opened.metadata()["mirrorhead.patch"])
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        change(content, tensors)
        save_file(tensors, file, {"mirrorhead.patch": json.dumps(content)})
        return file

    CHANGES: ClassVar[dict[str, Any]] = {
        "version": lambda c, t: c.update(version=2),
        "version true": lambda c, t: c.update(version=True),
        "version 1.0": lambda c, t: c.update(version=1.0),
        "weights": lambda c, t: c.update(weights=-1),
        "no tensors": lambda c, t: c.pop("tensors"),
        "tensors of another kind": lambda c, t: c.update(tensors=[3]),
        "huge count": lambda c, t: c["tensors"][0].update(count=2**60),
        "negative count": lambda c, t: c["tensors"][0].update(count=-1),
        "fewer": lambda c, t: c["tensors"][0].update(count=0),
        "huge whole tensor": lambda c, t: c["tensors"][0].update(count=None, shape=[2**31, 2**20]),
        "huge shape": lambda c, t: c["tensors"][0].update(shape=[2**40, 2**40]),
        "small shape": lambda c, t: c["tensors"][0].update(shape=[1]),
        "bool shape": lambda c, t: c["tensors"][0].update(shape=[True, 30]),
        "unknown dtype": lambda c, t: c["tensors"][0].update(dtype="F31"),
        "wrong dtype": lambda c, t: c["tensors"][0].update(dtype="F64"),
        "twice": lambda c, t: c["tensors"].append(c["tensors"][0]),
        "terminal codes": lambda c, t: c["tensors"][0].update(name="\x1b[2J"),
        "bad hash": lambda c, t: c["tensors"][0].update(base="../../etc"),
        "new but sparse": lambda c, t: c["tensors"][0].update(base=None),
        "tied to itself": lambda c, t: c["tensors"][0].update(tied=[c["tensors"][0]["name"]]),
        "tied to a number": lambda c, t: c["tensors"][0].update(tied=[3]),
        "tied to anything": lambda c, t: c["tensors"][0].update(tied=True),
        "no index": lambda c, t: t.pop("index"),
        "endless index": lambda c, t: t.update(index=torch.full((40,), 255, dtype=torch.uint8)),
        "unended index": lambda c, t: t.update(index=torch.tensor([128], dtype=torch.uint8)),
        "needless bytes": lambda c, t: t.update(
            index=torch.cat([torch.tensor([128, 0], dtype=torch.uint8), t["index"][1:]])
        ),
        "index of floats": lambda c, t: t.update(index=t["index"].float()),
        "fewer values": lambda c, t: t.update({"values.F32": t["values.F32"][1:]}),
        "more values": lambda c, t: t.update({"values.F32": torch.zeros(50)}),
        "two axes": lambda c, t: t.update({"values.F32": t["values.F32"][None]}),
        "NaN": lambda c, t: t["values.F32"].fill_(float("nan")),
        "foreign tensor": lambda c, t: t.update(other=torch.zeros(2)),
        "mislabelled dtype": lambda c, t: t.update({"values.I8": t.pop("values.F32")}),
        "fewer originals": lambda c, t: t.update({"originals.F32": t["originals.F32"][1:]}),
    }

    @pytest.mark.parametrize("name", CHANGES)
    def test_altered(self, name: str, patch: mh.Patch, tmp_path: Path) -> None:
        file = self.altered(patch, tmp_path, self.CHANGES[name])
        with pytest.raises(mh.PatchError, match=r"patch\.safetensors"):
            mh.Patch.load(file)

    def test_positions_that_overflow(self) -> None:
        gaps = np.full(4, 2**62 - 2)
        with pytest.raises(Exception, match="a position in tensor 'w' is outside of it"):
            positions(gaps, 2**62 - 1, "w")

    def test_an_index_takes_little_more_memory_than_its_positions(self) -> None:
        data = np.zeros(1 << 22, np.uint8)  # 4 M positions of 8 bytes
        tracemalloc.start()
        try:
            decode_gaps(data)
            assert tracemalloc.get_traced_memory()[1] < 12 * len(data)
        finally:
            tracemalloc.stop()

    def test_values_that_do_not_give_the_named_result(
        self, base: State, patch: mh.Patch, tmp_path: Path
    ) -> None:
        file = self.altered(patch, tmp_path, lambda c, t: t["values.F32"].mul_(2))
        before = copy_of(base)
        with pytest.raises(mh.PatchError, match="do not give the result"):
            mh.Patch.load(file).apply(base)
        assert same_bits(base, before)

    def test_a_new_tensor_with_other_values(self, base: State, tmp_path: Path) -> None:
        patch = mh.Patch.between(base, base | {"head": torch.ones(4).half()}, whole="head")
        file = self.altered(patch, tmp_path, lambda c, t: t["values.F16"].mul_(2))
        before = copy_of(base)
        with pytest.raises(mh.PatchError, match="the values for 'head' are not those"):
            mh.Patch.load(file).apply(base)
        assert same_bits(base, before)

    def test_originals_that_are_not_the_bases(
        self, base: State, patch: mh.Patch, tmp_path: Path
    ) -> None:
        file = self.altered(patch, tmp_path, lambda c, t: t["originals.F32"].mul_(2))
        patch.apply(base)
        with pytest.raises(mh.PatchError, match="another base"):
            mh.Patch.load(file).revert(base)

    def test_a_safetensors_file_that_is_no_patch(self, base: State, tmp_path: Path) -> None:
        save_file(base, tmp_path / "base.safetensors")
        with pytest.raises(mh.PatchError, match="is not a patch"):
            mh.Patch.load(tmp_path / "base.safetensors")

    def test_metadata_that_nests_without_end(self, tmp_path: Path) -> None:
        text = "[" * 200_000
        save_file({"index": torch.zeros(0)}, tmp_path / "p", {"mirrorhead.patch": text})
        with pytest.raises(mh.PatchError, match="not JSON"):
            mh.Patch.load(tmp_path / "p")

    def test_a_header_that_claims_more_than_the_file(self, tmp_path: Path) -> None:
        for length in (2**63, 2**30, 100):
            (tmp_path / "p").write_bytes(struct.pack("<Q", length) + b"{}" * 10)
            with pytest.raises(mh.PatchError, match="cannot be read"):
                mh.Patch.load(tmp_path / "p")

    @pytest.mark.slow
    @settings(max_examples=200)
    @given(st.data())
    def test_truncated_or_damaged_anywhere(self, data: st.DataObject) -> None:
        import tempfile

        base = small_state()
        patch = mh.Patch.between(base, tuned_from(base), keep=0.2)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "p"
            patch.save(file)
            whole = file.read_bytes()
            cut = data.draw(st.integers(0, len(whole) - 1))
            if data.draw(st.booleans()):
                damaged = whole[:cut]
            else:
                damaged = bytearray(whole)
                damaged[cut] ^= data.draw(st.integers(1, 255))
            file.write_bytes(bytes(damaged))
            state = copy_of(base)
            try:
                mh.Patch.load(file).apply(state)
            except mh.PatchError:
                assert same_bits(state, base)
            else:  # the damage is in the originals or spaces, which `apply` does not need
                patch.verify(state)
