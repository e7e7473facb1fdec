"""Patches: they keep the largest changes, and apply and revert to the bit."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import mirrorhead as mh
from mirrorhead.patches import file_format
from mirrorhead.patches.file_format import decode_gaps, encode_gaps, positions
from patch_cases import State, copy_of, same_bits, sharded_folder, small_state, tuned_from

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@st.composite
def checkpoints(draw: st.DrawFn, dtype: torch.dtype) -> tuple[State, State]:
    """A base and a tuned state dict: any shapes, some weights changed, zeros of both signs."""
    seed = draw(st.integers(0, 2**32))
    generator = torch.Generator().manual_seed(seed)
    base, tuned = {}, {}
    for i in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(0, 9), max_size=3))
        scale = draw(st.sampled_from([1e-6, 1.0, 1e4]))
        before = scale * torch.randn(shape, generator=generator)
        before[torch.rand(shape, generator=generator) < 0.1] = 0.0
        before = before.to(dtype)
        moved = (before + scale * 0.1 * torch.randn(shape, generator=generator)).to(dtype)
        flipped = torch.where(torch.rand(shape, generator=generator) < 0.1, -before, moved)
        changed = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.1, 1.0]))
        base[f"block.{i}.weight"] = before
        tuned[f"block.{i}.weight"] = torch.where(changed, flipped, before)
    return base, tuned


@pytest.mark.parametrize("dtype", DTYPES)
def test_drop_and_rescale(dtype: torch.dtype, tmp_path: Path) -> None:
    """random=True takes a share of the changes, each divided by the share, and is still a patch."""
    generator = torch.Generator().manual_seed(0)
    base = {name: torch.randn(100, 100, generator=generator).to(dtype) for name in "ab"}
    tuned = {name: (t.double() + 0.1 * (t.double() + 2)).to(dtype) for name, t in base.items()}
    patch = mh.Patch.between(base, tuned, keep=0.05, random=True, seed=3)
    assert 900 < patch.count < 1100  # 1,000 of 20,000; the standard deviation is 31
    for name, one in patch.tensors.items():
        assert one.index is not None
        old, new = (state[name].flatten()[one.index].double() for state in (base, tuned))
        assert same_bits({"x": one.values}, {"x": (old + (new - old) / 0.05).to(dtype)})
    assert not torch.equal(patch.tensors["a"].index, patch.tensors["b"].index)  # pyright: ignore
    save_file(base, tmp_path / "base")
    save_file(tuned, tmp_path / "tuned")
    again = mh.Patch.between(tmp_path / "base", tmp_path / "tuned", keep=0.05, random=True, seed=3)
    state = copy_of(base)
    for other in (again, patch):
        other.apply(state)
        other.verify(state)
        other.revert(state)
    assert same_bits(state, base) and again.tensors.keys() == patch.tensors.keys()
    assert mh.Patch.between(base, tuned, keep=0.05, random=True).count != patch.count
    whole = mh.Patch.between(base, tuned, keep=1.0, random=True)
    whole.apply(state)
    assert same_bits(state, tuned)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_patches_apply_and_revert_to_the_bit(
    dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("patches")

    @settings(max_examples=1000)
    @given(checkpoints(dtype), st.floats(0.01, 1.0), st.booleans())
    def law(pair: tuple[State, State], keep: float, full: bool) -> None:
        base, tuned = pair
        patch = mh.Patch.between(base, tuned, keep=1.0 if full else keep)
        patch.save(folder / "patch.safetensors")
        assert (folder / "patch.safetensors").stat().st_size == patch.bytes
        patch = mh.Patch.load(folder / "patch.safetensors")
        state = copy_of(base)
        patch.apply(state)
        patch.verify(state)
        if full:
            assert same_bits(state, tuned)
        patch.revert(state)
        assert same_bits(state, base)

    law()


@pytest.mark.parametrize("dtype", DTYPES)
def test_keeps_exactly_the_largest_changes(dtype: torch.dtype) -> None:
    base = small_state(dtype)
    tuned = tuned_from(base)
    names = [name for name in base if base[name].is_floating_point()]
    moved = torch.cat([(tuned[n].double() - base[n].double()).abs().flatten() for n in names])
    moved = moved[moved > 0]
    for count in (1, 7, 30, 58):
        patch = mh.Patch.between(base, tuned, count=count)
        found = [abs(after - before) for *_, before, after in patch.largest(1000)]
        assert patch.count == len(found) == count
        # Equal changes are interchangeable, so sizes are compared, not places.
        expected = moved.sort(descending=True).values[:count]
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected)


def test_ties_are_broken_by_order_and_counted_exactly() -> None:
    base = {"a": torch.zeros(50), "b": torch.zeros(50)}
    tuned = {"a": torch.ones(50), "b": torch.ones(50)}
    patch = mh.Patch.between(base, tuned, count=60)
    assert [len(patch.tensors[n].values) for n in "ab"] == [50, 10]


def test_tolerance_keeps_what_moved_further() -> None:
    base = {"w": torch.zeros(4)}
    tuned = {"w": torch.tensor([0.0, 0.1, -0.2, 0.3])}
    patch = mh.Patch.between(base, tuned, tolerance=0.15)
    assert patch.tensors["w"].index is not None
    assert patch.tensors["w"].index.tolist() == [2, 3]


def test_keep_is_a_share_of_the_weights() -> None:
    base = {"w": torch.zeros(2000)}
    tuned = {"w": torch.arange(2000.0)}
    patch = mh.Patch.between(base, tuned, keep=0.01)
    assert patch.count == 20
    assert patch.density() == 0.01


def test_numbers_of_numpy_and_sizes_without_end() -> None:
    base = {"w": torch.zeros(20)}
    tuned = {"w": torch.arange(20.0)}
    assert mh.Patch.between(base, tuned, count=np.int64(3)).count == 3  # type: ignore[arg-type]
    assert mh.Patch.between(base, tuned, max_bytes="9" * 400).count == 19


@pytest.mark.parametrize("limit", [700, 1500, "4 kB", "1 MiB"])
def test_max_bytes_is_kept_and_used(limit: int | str, tmp_path: Path) -> None:
    base = {"w": torch.zeros(3000)}
    tuned = {"w": torch.randn(3000)}
    patch = mh.Patch.between(base, tuned, max_bytes=limit)
    patch.save(tmp_path / "p")
    size = (tmp_path / "p").stat().st_size
    allowed = {"4 kB": 4000, "1 MiB": 2**20}.get(str(limit), limit)
    assert isinstance(allowed, int)
    assert size <= allowed
    # One weight more does not fit: it takes at most 8 bytes of values, 2 of index and 8 of padding.
    assert patch.count == 3000 or size > allowed - 24
    patch.verify({"w": torch.where(patch_mask(patch, 3000), tuned["w"], base["w"])})


def patch_mask(patch: mh.Patch, size: int) -> torch.Tensor:
    mask = torch.zeros(size, dtype=torch.bool)
    index = patch.tensors["w"].index
    assert index is not None
    mask[index] = True
    return mask


def test_whole_tensors_are_stored_whole_and_not_counted() -> None:
    base = small_state()
    tuned = tuned_from(base) | {"head.weight": torch.randn(2, 4)}
    patch = mh.Patch.between(base, tuned, count=5, whole=["*.bias", "head.*"])
    assert patch.tensors["layer.0.bias"].index is None
    assert patch.tensors["head.weight"].added
    assert sum(len(p.values) for p in patch.tensors.values() if p.index is not None) == 5
    state = copy_of(base)
    patch.apply(state)
    assert torch.equal(state["layer.0.bias"], tuned["layer.0.bias"])
    assert torch.equal(state["head.weight"], tuned["head.weight"])
    patch.revert(state)
    assert same_bits(state, base)


def test_models_are_patched_in_place_and_tied_weights_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.out = nn.Linear(3, 5, bias=False)
            self.out.weight = self.embed.weight

    base, tuned = Tied(), Tied()
    tuned.load_state_dict(base.state_dict())
    with torch.no_grad():
        tuned.embed.weight[2, 1] += 1
    patch = mh.Patch.between(base, tuned)
    assert patch.count == 1
    before = base.embed.weight.detach().clone()
    parameter = base.embed.weight
    patch.apply(base)
    assert base.embed.weight is parameter is base.out.weight
    assert torch.equal(parameter, tuned.embed.weight)
    patch.revert(base)
    assert torch.equal(parameter, before)


def test_tied_weights_that_a_file_stores_once_or_twice(tmp_path: Path) -> None:
    weight = torch.randn(4, 3)
    model = {"embed": weight, "head": weight}  # one tensor, two names
    after = weight.clone()
    after[1, 1] += 1
    tuned = {"embed": after, "head": after}
    for names in (["embed"], ["head"], ["embed", "head"]):
        save_file({name: weight.clone() for name in names}, tmp_path / "base")
        save_file({name: after.clone() for name in names}, tmp_path / "tuned")
        for one, two in (
            (tmp_path / "base", tuned),
            (model, tmp_path / "tuned"),
            (tmp_path / "base", tmp_path / "tuned"),
        ):
            patch = mh.Patch.between(one, two)
            target_weight = weight.clone()
            target = {"embed": target_weight, "head": target_weight}
            patch.apply(target)
            assert torch.equal(target_weight, after)
            patch.revert(target)
            assert torch.equal(target_weight, weight)


class TestTiedWeights:
    """A model ties `head` to `embed`; copies of its state dict do not show that."""

    def model(self) -> State:
        weight = torch.randn(4, 3)
        return {"embed": weight, "head": weight}

    def test_a_copy_of_a_tied_model_counts_each_weight_once(self) -> None:
        base = self.model()
        after = base["embed"] + torch.randn(4, 3)
        for tuned in (
            {"embed": after, "head": after},
            {"embed": after.clone(), "head": after.clone()},
        ):
            for start in (base, copy_of(base)):
                if start is not base and tuned["embed"] is not tuned["head"]:
                    continue  # nothing says that they are tied
                patch = mh.Patch.between(start, tuned, count=3)
                assert patch.count == 3
                patch.apply(base)
                assert int((base["embed"] == after).sum()) == 3
                patch.revert(base)

    def test_each_copy_in_the_target_is_patched(self, tmp_path: Path) -> None:
        base = self.model()
        after = base["embed"] + torch.randn(4, 3)
        mh.Patch.between(base, {"embed": after, "head": after}).save(tmp_path / "p")
        patch = mh.Patch.load(tmp_path / "p")
        state = copy_of(base)
        patch.apply(state)
        assert torch.equal(state["embed"], after) and torch.equal(state["head"], after)
        patch.verify(state)
        state["head"][0, 0] += 1
        with pytest.raises(mh.PatchError, match="'head' is not the patched one"):
            patch.verify(state)
        with pytest.raises(mh.PatchError, match="'head' does not hold"):
            patch.revert(state)
        state["head"][0, 0] = after[0, 0]
        patch.revert(state)
        assert same_bits(state, copy_of(base))

    @pytest.mark.parametrize("name", ["embed", "head"])
    def test_a_file_may_have_any_of_the_names(self, name: str, tmp_path: Path) -> None:
        base = self.model()
        after = base["embed"] + torch.randn(4, 3)
        patch = mh.Patch.between(base, {"embed": after, "head": after})
        save_file({name: base[name]}, tmp_path / "base")
        patch.apply(tmp_path / "base", tmp_path / "out")
        patch.verify(tmp_path / "out")
        assert same_bits(load_file(tmp_path / "out"), {name: after})
        patch.with_originals(tmp_path / "base")
        mh.Patch.merge([patch, patch], "mean", base=tmp_path / "base").apply(base)
        assert torch.equal(base["head"], after)

    def test_merging_needs_them_tied_in_all_patches(self) -> None:
        base = self.model()
        one = mh.Patch.between(base, dict.fromkeys(base, base["embed"] + 1))
        two = mh.Patch.between(base, {"embed": base["embed"] + 1, "head": base["head"] + 2})
        with pytest.raises(mh.PatchError, match="are one tensor in one of the patches"):
            mh.Patch.merge([one, two])


def test_weights_that_fine_tuning_untied_are_refused_for_a_tied_model(tmp_path: Path) -> None:
    weight = torch.randn(4, 3)
    untied = {"embed": weight.clone(), "head": weight.clone()}
    patch = mh.Patch.between(untied, {"embed": weight + 1, "head": weight - 1})
    tied = {"embed": weight.clone()}
    tied["head"] = tied["embed"]
    with pytest.raises(mh.PatchError, match="'head' and 'embed' are one tensor there"):
        patch.apply(tied)
    assert torch.equal(tied["embed"], weight)


def test_a_patch_does_not_follow_the_model_it_came_from() -> None:
    base, tuned = {"w": torch.zeros(3)}, {"w": torch.ones(3)}
    for whole in ((), ("w",)):
        patch = mh.Patch.between(base, tuned, whole=whole)
        tuned["w"].mul_(5)
        state = {"w": torch.zeros(3)}
        patch.apply(state)
        assert torch.equal(state["w"], tuned["w"] / 5)
        tuned["w"].div_(5)


def test_tensors_that_are_not_contiguous() -> None:
    base = {"w": torch.randn(4, 6).t()}
    tuned = {"w": base["w"] + 1}
    patch = mh.Patch.between(base, tuned, count=7)
    before = base["w"].clone()
    patch.apply(base)
    assert int((base["w"] != before).sum()) == 7
    patch.revert(base)
    assert torch.equal(base["w"], before)


@pytest.mark.parametrize("kind", ["file", "folder", "shards"])
def test_files_and_folders(kind: str, tmp_path: Path) -> None:
    base = small_state(torch.bfloat16)
    tuned = tuned_from(base) | {"head.bias": torch.randn(3)}
    places = {}
    for name, state in (("base", base), ("tuned", tuned)):
        places[name] = tmp_path / name
        if kind == "file":
            places[name] = tmp_path / f"{name}.safetensors"
            save_file(state, places[name], {"format": "pt"})
        elif kind == "folder":
            places[name].mkdir()
            save_file(state, places[name] / "model.safetensors", {"format": "pt"})
            (places[name] / "config.json").write_text("{}")
        else:
            sharded_folder(places[name], state)
    calls: list[tuple[int, int]] = []
    patch = mh.Patch.between(
        places["base"], places["tuned"], whole="head.*", progress=lambda a, b: calls.append((a, b))
    )
    assert calls[-1][0] == calls[-1][1] > 0
    patch.apply(places["base"], tmp_path / "patched")
    patch.verify(tmp_path / "patched")
    assert same_bits(everything(tmp_path / "patched"), tuned)
    patch.revert(tmp_path / "patched", tmp_path / "reverted")
    assert same_bits(everything(tmp_path / "reverted"), base)
    if kind != "file":
        assert (tmp_path / "patched" / "config.json").exists()
        assert not (tmp_path / "patched" / "pytorch_model.bin").exists()
    if kind == "file":  # writing is deterministic, so even the files are equal
        assert (tmp_path / "reverted").read_bytes() == places["base"].read_bytes()


def everything(path: Path) -> State:
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def test_modules_of_sentence_transformers_keep_their_weights(tmp_path: Path) -> None:
    base = small_state()
    folder = sharded_folder(tmp_path / "base", base)
    (folder / "modules.json").write_text('[{"path": ""}, {"path": "2_Dense"}]')
    for place in ("2_Dense/model.safetensors", "onnx/model.onnx", ".git/objects/1"):
        (folder / place).parent.mkdir(parents=True)
        (folder / place).write_bytes(b"content")
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"metadata": {', '"metadata": null, "other": {'))
    mh.Patch.between(base, tuned_from(base)).apply(folder, tmp_path / "out")
    assert (tmp_path / "out" / "2_Dense" / "model.safetensors").read_bytes() == b"content"
    assert not (tmp_path / "out" / "onnx").exists() and not (tmp_path / "out" / ".git").exists()


def test_a_shards_index_names_new_tensors(tmp_path: Path) -> None:
    from mirrorhead.patches.checkpoints import FileCheckpoint, checkpoint_files

    base = small_state()
    sharded_folder(tmp_path / "base", base)
    patch = mh.Patch.between(base, base | {"head": torch.ones(2)}, whole="head")
    patch.apply(tmp_path / "base", tmp_path / "out")
    files = checkpoint_files(tmp_path / "out")
    assert "head" in FileCheckpoint(files, "out").infos
    text = (tmp_path / "out" / "model.safetensors.index.json").read_text()
    assert '"head": "model-00002-of-00002.safetensors"' in text


def test_without_originals_the_file_is_smaller_and_revert_needs_the_base(tmp_path: Path) -> None:
    base = {"w": torch.randn(5000)}
    patch = mh.Patch.between(base, {"w": base["w"] + torch.randn(5000)}, keep=0.5)
    patch.save(tmp_path / "small", originals=False)
    assert (tmp_path / "small").stat().st_size < 0.65 * patch.bytes
    small = mh.Patch.load(tmp_path / "small")
    state = copy_of(base)
    full = small.with_originals(base)
    small.apply(state)
    with pytest.raises(mh.PatchError, match="with_originals"):
        small.revert(state)
    full.revert(state)
    assert same_bits(state, base)
    assert full.bytes == patch.bytes


def test_repr_is_a_table_by_layer() -> None:
    base = small_state()
    text = repr(mh.Patch.between(base, tuned_from(base)))
    assert text.startswith("Patch(61 of 61 weights in 4 tensors")
    assert [line.split()[0] for line in text.splitlines()[1:]] == [
        "layer", "layer.0", "layer.1", "scale",
    ]  # fmt: skip


def test_a_change_that_is_not_known_is_not_0(tmp_path: Path) -> None:
    base = small_state()
    patch = mh.Patch.between(base, tuned_from(base) | {"head": torch.ones(2)}, whole="head")
    patch.save(tmp_path / "p", originals=False)
    assert {row[3] for row in mh.Patch.load(tmp_path / "p").layers()} == {None}
    assert [row[0] for row in patch.layers() if row[3] is None] == ["head"]
    assert repr(patch).splitlines()[2].split() == ["head", "2", "100.0000%", "-"]


def test_an_infinity_that_stays_is_no_change() -> None:
    base = {"mask": torch.tensor([-torch.inf, 1.0, 2.0])}
    patch = mh.Patch.between(base, {"mask": torch.tensor([-torch.inf, 1.0, 3.0])}, whole="mask")
    assert patch.layers() == [("mask", 3, 3, 1.0)]
    assert patch.largest() == [("mask", (2,), 2.0, 3.0)]


@pytest.mark.parametrize("piece", [1 << 16, 9])
def test_positions_survive_the_file(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_format, "_PIECE", piece)

    @given(st.lists(st.integers(0, 2**62 - 2), unique=True, max_size=50))
    def law(numbers: list[int]) -> None:
        index = torch.tensor(sorted(numbers), dtype=torch.int64)
        gaps = decode_gaps(encode_gaps([index]))
        assert torch.equal(positions(gaps, 2**62 - 1, "w"), index)

    law()


class TestMerge:
    def patches(self, base: State, changes: list[dict[int, float]]) -> list[mh.Patch]:
        found = []
        for change in changes:
            tuned = copy_of(base)
            for place, value in change.items():
                tuned["w"][place] += value
            found.append(mh.Patch.between(base, tuned))
        return found

    @pytest.mark.parametrize(
        ("method", "expected"),
        [("sum", [1.0, 3.0, 1.0, 0.0]), ("mean", [0.5, 1.5, 0.5, 0.0]), ("ties", [1, 1.5, 2, 0])],
    )
    def test_formulas(self, method: str, expected: list[float]) -> None:
        base = {"w": torch.zeros(4)}
        both = self.patches(base, [{0: 1.0, 1: 1.0, 2: 2.0}, {1: 2.0, 2: -1.0}])
        merged = mh.Patch.merge(both, method, base=base)  # type: ignore[arg-type]
        state = copy_of(base)
        merged.apply(state)
        merged.verify(state)
        assert state["w"].tolist() == expected
        merged.revert(state)
        assert same_bits(state, base)

    @pytest.mark.parametrize("method", ["sum", "mean", "ties"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_one_patch_merges_to_itself_and_order_does_not_matter(
        self, method: str, dtype: torch.dtype
    ) -> None:
        base = small_state(dtype)
        some = [mh.Patch.between(base, tuned_from(base, seed), keep=0.3) for seed in (1, 2, 3)]
        assert_same(mh.Patch.merge(some[:1], method), some[0])  # type: ignore[arg-type]
        first = mh.Patch.merge(some, method)  # type: ignore[arg-type]
        for order in itertools.permutations(some):
            assert_same(mh.Patch.merge(order, method), first)  # type: ignore[arg-type]

    def test_where_one_patch_is_alone_its_value_is_kept_to_the_bit(self) -> None:
        base = {"w": torch.randn(1000).bfloat16()}
        one, two = copy_of(base), copy_of(base)
        one["w"][:500] += torch.randn(500).bfloat16()
        two["w"][500:] += torch.randn(500).bfloat16()
        merged = mh.Patch.merge([mh.Patch.between(base, one), mh.Patch.between(base, two)])
        state = copy_of(base)
        merged.apply(state)
        assert torch.equal(state["w"], torch.cat([one["w"][:500], two["w"][500:]]))

    def test_a_sum_that_overflows(self) -> None:
        base = {"w": torch.full((2,), 60000.0).half()}
        patch = mh.Patch.between(base, {"w": torch.full((2,), 65000.0).half()})
        with pytest.raises(mh.PatchError, match=r"'w' add up to more than torch\.float16 can hold"):
            mh.Patch.merge([patch, patch])

    def test_heads_of_tasks_must_be_left_out(self) -> None:
        base = small_state()
        tuned = [tuned_from(base, s) | {"head": torch.randn(s + 1)} for s in (1, 2)]
        both = [mh.Patch.between(base, t, keep=0.2, whole="head") for t in tuned]
        with pytest.raises(mh.PatchError, match="'head'"):
            mh.Patch.merge(both)
        assert "head" not in mh.Patch.merge([p.without("head") for p in both]).tensors

    def test_other_bases_are_refused(self) -> None:
        one, two = small_state(seed=1), small_state(seed=2)
        both = [mh.Patch.between(b, tuned_from(b)) for b in (one, two)]
        with pytest.raises(mh.PatchError, match="different bases"):
            mh.Patch.merge(both)
        with pytest.raises(ValueError, match="sum, mean, ties"):
            mh.Patch.merge(both, "median")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="at least one"):
            mh.Patch.merge([])


def assert_same(one: mh.Patch, other: mh.Patch) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    for name, patch in one.tensors.items():
        assert patch.index is not None
        index = other.tensors[name].index
        assert index is not None
        assert torch.equal(patch.index, index)
        assert torch.equal(patch.values, other.tensors[name].values)


def test_state_dict_of_changes_adds_up() -> None:
    base = small_state()
    tuned = tuned_from(base)
    changes = mh.Patch.between(base, tuned, whole="*.bias").to_state_dict()
    assert changes["layer.0.weight"].is_sparse
    for name, change in changes.items():
        dense = change.to_dense() if change.is_sparse else change
        torch.testing.assert_close(base[name] + dense, tuned[name])


_BIG = """
import resource, sys
import mirrorhead as mh
start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
patch = mh.Patch.between(sys.argv[1], sys.argv[2], keep=1e-3)
patch.apply(sys.argv[1], sys.argv[3])
patch.verify(sys.argv[3])
print(patch.count, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) * 1024)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    size, layers = 1 << 25, 16  # 16 tensors of 64 MiB in bf16: two files of 1 GiB
    tensor = torch.randn(size // 64).bfloat16().repeat(64)
    base = {f"layer.{i}.weight": tensor.clone() for i in range(layers)}
    save_file(base, tmp_path / "base.safetensors")
    for tensor in base.values():
        tensor[::512] += 1
    save_file(base, tmp_path / "tuned.safetensors")
    del base
    files = [str(tmp_path / f"{name}.safetensors") for name in ("base", "tuned", "out")]
    done = subprocess.run(
        [sys.executable, "-c", _BIG, *files], capture_output=True, text=True, check=True
    )
    count, grown = map(int, done.stdout.split())
    assert count == round(1e-3 * size * layers)
    # Some pieces of 16 MiB, and 28 bytes for each of 537,000 changes: far from 1 GiB.
    assert grown < 400 << 20, f"{grown / 2**20:.0f} MiB"
