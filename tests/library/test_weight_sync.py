"""Weight sync: patches that hold exactly what changed, and receivers that end on the same bits."""

from __future__ import annotations

import copy
import functools
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import mirrorhead as mh
from mirrorhead.patches import fingerprint
from mirrorhead.patches.checkpoints import TensorInfo, bits
from mirrorhead.patches.file_format import TensorPatch
from mirrorhead.patches.fingerprint import Fingerprint
from patch_cases import State, copy_of, same_bits, small_state

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "MirrorAdam": lambda params: mh.MirrorAdam(params, lr=1e-3, geometry=1.5),
    "MirrorDescent": lambda params: mh.MirrorDescent(params, lr=1e-2, geometry=1.1),
}


class Net(nn.Module):
    """Tied weights, a buffer of integers and one of statistics, a scalar."""

    def __init__(self, width: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.head(self.norm(self.embed(x)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        x = torch.randint(7, (12,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x).float(), x).backward()
        optimizer.step()


def cast(model: nn.Module, dtype: torch.dtype | None) -> State:
    """What receivers must hold."""
    return {
        name: t.detach().to(dtype if dtype and t.is_floating_point() else t.dtype).clone()
        for name, t in model.state_dict().items()
    }


def set_up(
    width: int = 5, name: str = "AdamW", dtype: torch.dtype | None = torch.bfloat16
) -> tuple[Net, torch.optim.Optimizer, mh.WeightSync, State]:
    torch.manual_seed(0)
    model = Net(width)
    sync = mh.WeightSync(model, dtype)
    return model, OPTIMIZERS[name](model.parameters()), sync, sync.weights()


# --- Fingerprints ---------------------------------------------------------------------------


def mixed(place: int, x: int) -> tuple[int, int]:
    """The formula in whole numbers of Python."""
    most = 2**64 - 1
    sums = []
    for (a, b), (r, c), (s, d), t in (
        ((0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93), (33, 0xFF51AFD7ED558CCD),
         (33, 0xC4CEB9FE1A85EC53), 33),
        ((0xA0761D6478BD642F, 0xE7037ED1A0B428DB), (30, 0xBF58476D1CE4E5B9),
         (27, 0x94D049BB133111EB), 31),
    ):  # fmt: skip
        z = ((place + 1) * a & most) ^ (x * b & most)
        z = (z ^ z >> r) * c & most
        z = (z ^ z >> s) * d & most
        sums.append(z ^ z >> t)
    return sums[0], sums[1]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.int64]
)
@given(data=st.data())
def test_a_fingerprint_is_the_sum_of_its_formula(
    compiled: bool, dtype: torch.dtype, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    size = data.draw(st.sampled_from([0, 1, 7, 64, 70]))
    values = (100 * torch.randn(size, generator=generator)).to(dtype)
    first = data.draw(st.sampled_from([0, 5, 2**33]))
    width = 8 * values.element_size()
    numbers = [x % 2**width for x in bits(values).tolist()]
    sums = [mixed(first + k, x) for k, x in enumerate(numbers)]
    expected = Fingerprint(sum(one for one, _ in sums), sum(two for _, two in sums))
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(fingerprint, "_sum_in_c", lambda: None)
        assert str(Fingerprint.of(values, first)) == str(expected)
        where = torch.arange(first, first + size)
        assert str(Fingerprint.of(values, where)) == str(expected)
        order = torch.randperm(size, generator=generator)
        assert str(Fingerprint.of(values[order], where[order])) == str(expected)
    assert str(Fingerprint.parse(str(expected))) == str(expected)


def test_fingerprints_tell_small_edits_apart() -> None:
    """All pairs of bits flipped, all exchanges, all shifts of a small tensor."""
    start = torch.arange(40, dtype=torch.int16)
    seen = {str(Fingerprint.of(start))}
    others = 1
    for i in range(40):
        for j in range(i):
            swapped = start.clone()
            swapped[[i, j]] = start[[j, i]]
            flipped = start.clone()
            flipped[i] ^= 1 << i % 15
            flipped[j] ^= 1 << j % 15
            seen |= {str(Fingerprint.of(swapped)), str(Fingerprint.of(flipped))}
            others += 2
        seen.add(str(Fingerprint.of(start.roll(i + 1) + 1)))
        others += 1
    assert len(seen) == others
    # Each bit of the sums is set in about half of them.
    words = torch.tensor([[int(text, 16) >> k & 1 for k in range(128)] for text in seen])
    assert words.double().mean(0).sub(0.5).abs().max() < 0.1


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    ("now", "sent"),
    [
        (torch.float32, torch.bfloat16), (torch.float32, torch.float16),
        (torch.float64, torch.bfloat16), (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float8_e4m3fn), (torch.int64, torch.int64),
        (torch.bool, torch.bool),
    ],
)  # fmt: skip
def test_changed_finds_all_and_only_other_bits(
    compiled: bool, now: torch.dtype, sent: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(fingerprint, "_compare_in_c", lambda: None)
    generator = torch.Generator().manual_seed(0)
    for size in (0, 1, 63, 64, 65, 1000):
        x = (3 * torch.randn(size, generator=generator)).to(now)
        snapshot = x.to(sent)
        if now.is_floating_point and size > 60:
            edges = [-0.0, 0.0, float("inf"), 3.3e38, 1e-40, 1.00390625, 1.01171875, float("nan")]
            x[: len(edges)] = torch.tensor(edges).to(now)
            snapshot[0], snapshot[1], snapshot[7] = 0.0, -0.0, float("nan")
        moved = torch.rand(size, generator=generator) < 0.1
        moved[:8] = False
        new = torch.where(moved, (x.double() * 1.004 + 1e-4).to(now), x)
        if size > 60:
            snapshot[2:7] = new[2:7].to(sent)
            snapshot[5] = 1  # one that differs
        found = fingerprint.changed(new, snapshot)
        differs = bits(new.to(sent)) != bits(snapshot)
        if now != sent:
            differs &= ~(new.to(sent).double().isnan() & snapshot.double().isnan())
        places = differs.nonzero().flatten()
        assert torch.equal(found.places, places)
        assert torch.equal(bits(found.before), bits(snapshot[places]))
        assert torch.equal(bits(found.after), bits(new.to(sent)[places]))


# --- Patches --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, None], ids=str
)
def test_a_patch_holds_exactly_the_entries_whose_bits_changed(
    name: str, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    model, optimizer, sync, served = set_up(name=name, dtype=dtype)
    receiver = mh.WeightReceiver(served)
    for step in range(6):
        before = cast(model, dtype)
        train(model, optimizer)
        after = cast(model, dtype)
        patch = sync.collect()
        assert sync.number == step + 1
        for key, part in patch.tensors.items():
            assert part.index is not None
            moved = (bits(before[key]) != bits(after[key])).flatten().nonzero().flatten()
            assert torch.equal(part.index, moved)
            assert torch.equal(part.values, after[key].flatten()[moved])
            assert torch.equal(part.before(), before[key].flatten()[moved])
        assert {*patch.tensors} == {*after} - {"head.weight"}
        patch.save(tmp_path / "patch.safetensors")
        receiver.receive([tmp_path / "patch.safetensors"])
        assert same_bits(served, after)
        assert receiver.version == sync.version == patch.version
        receiver.verify()
    assert sync.collect().count == 0


def test_bfloat16_parameters_and_parameters_by_name() -> None:
    torch.manual_seed(0)
    model = Net(4, torch.bfloat16)
    served = copy.deepcopy(model).state_dict()
    sync = mh.WeightSync(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 3)
    patch = sync.collect()
    assert {*patch.tensors} == {name for name, _ in model.named_parameters()}
    patch.apply(served)
    for name, param in model.named_parameters():
        assert torch.equal(served[name], param)
    patch.verify(served)
    patch.revert(served)
    patch.verify_base(served)


def test_what_was_not_committed_is_in_the_next_patch() -> None:
    model, optimizer, sync, served = set_up()
    start, base = sync.version, copy_of(served)
    train(model, optimizer)
    lost = sync.collect(commit=False)
    assert sync.version == start == lost.base_version
    train(model, optimizer)
    patch = sync.collect(commit=False)
    assert patch.base_version == start
    train(model, optimizer)  # after the collect: not part of what is committed
    sync.commit()
    assert sync.version == patch.version != start
    assert same_bits(sync.weights(), _applied(patch, base))
    following = sync.collect()
    receiver = mh.WeightReceiver(served)
    receiver.receive([lost, patch, following])
    assert same_bits(served, cast(model, torch.bfloat16))
    with pytest.raises(mh.PatchError, match="nothing is pending"):
        sync.commit()


def test_an_interrupted_commit_is_finished_by_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer, sync, _ = set_up()
    train(model, optimizer)
    patch = sync.collect(commit=False)

    class Interrupting(dict[str, Any]):
        def items(self) -> Any:
            for k, pair in enumerate(super().items()):
                if k == 2:
                    raise KeyboardInterrupt
                yield pair

    assert sync._pending is not None
    whole = sync._pending
    sync._pending = whole._replace(changes=Interrupting(whole.changes))
    with pytest.raises(KeyboardInterrupt):
        sync.commit()
    sync._pending = whole
    following = sync.collect()
    assert following.base_version == patch.version
    assert following.count == 0


def _applied(patch: mh.Patch, state: State) -> State:
    state = copy_of(state)
    patch.apply(state)
    return state


def test_weights_that_are_not_finite_are_not_collected() -> None:
    model, _, sync, _ = set_up()
    start = sync.version
    for bad in (float("nan"), float("inf"), 3.4e38):  # the last is infinite in bfloat16
        with torch.no_grad():
            old = model.embed.weight[1, 2].clone()
            model.embed.weight[1, 2] = bad
        with pytest.raises(mh.PatchError, match=r"'embed.weight' changes to or from NaN"):
            sync.collect()
        with torch.no_grad():
            model.embed.weight[1, 2] = old
    assert sync.version == start
    assert sync.collect().count == 0


def test_huge_weights_that_are_finite_are_collected() -> None:
    """Sums and float32 overflow, the weights do not."""
    for dtype, most in ((torch.float64, 1e308), (torch.float32, 3e38), (torch.bfloat16, 3e38)):
        state = {"w": torch.ones(9, dtype=dtype)}
        sync = mh.WeightSync(state, None)
        served = sync.weights()
        state["w"].fill_(most)
        sync.collect().apply(served)
        assert same_bits(served, state)


def test_a_model_that_is_not_the_one_before_is_refused() -> None:
    model, _, sync, _ = set_up()
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    with pytest.raises(mh.PatchError, match="other tensors share memory than before"):
        sync.collect()
    model.head.weight = model.embed.weight
    model.extra = nn.Linear(2, 2)
    with pytest.raises(mh.PatchError, match="the model has other tensors than before"):
        sync.collect()
    with pytest.raises(mh.PatchError, match="is new since the sync was made"):
        sync.weights()
    with pytest.raises(ValueError, match="dtype must be a floating-point dtype or None"):
        mh.WeightSync(model, torch.int8)
    with pytest.raises(TypeError, match=r"pairs of names and tensors, such as model\.named_par"):
        mh.WeightSync(model.parameters())  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="model must be a model or a state dict, got str"):
        mh.WeightReceiver("model")  # pyright: ignore[reportArgumentType]


# --- Chains ---------------------------------------------------------------------------------


@functools.cache
def some_patches() -> tuple[list[State], list[mh.Patch]]:
    """The states at each of six versions, and the patches between them."""
    model, optimizer, sync, state = set_up(name="SGD")
    states, patches = [state], []
    for _ in range(5):
        train(model, optimizer)
        patches.append(sync.collect())
        states.append(sync.weights())
    return states, patches


@given(start=st.integers(0, 4), length=st.integers(1, 5), originals=st.booleans())
def test_then_is_one_patch_after_the_other(start: int, length: int, originals: bool) -> None:
    states, patches = some_patches()
    end = min(5, start + length)
    parts = [p if originals else _without_originals(p) for p in patches[start:end]]
    jump = parts[0]
    for part in parts[1:]:
        jump = jump.then(part)
    assert same_bits(_applied(jump, states[start]), states[end])
    assert (jump.base_version, jump.version) == (patches[start].base_version, parts[-1].version)
    if originals:  # exactly what differs
        for name, part in jump.tensors.items():
            differs = bits(states[start][name]) != bits(states[end][name])
            assert part.index is not None
            assert part.index.tolist() == differs.flatten().nonzero().flatten().tolist()
        assert same_bits(_applied(jump.inverse(), states[end]), states[start])


def _without_originals(patch: mh.Patch) -> mh.Patch:
    tensors = {
        name: TensorPatch(p.info, p.index, p.values, None, p.base, p.result, p.tied)
        for name, p in patch.tensors.items()
    }
    return mh.Patch(tensors, patch.weights)


@pytest.mark.parametrize("whole", [(), "layer.0.*", "*"])
def test_then_composes_patches_of_every_kind(whole: Any) -> None:
    start = small_state()
    middle = copy_of(start) | {"head": torch.ones(2, 2)}
    middle["layer.0.weight"][0] += 1
    middle["scale"] = middle["scale"] + 1
    end = copy_of(middle)
    end["layer.0.weight"][1] += 1
    end["layer.0.weight"][0, 0] = start["layer.0.weight"][0, 0]
    end["head"][0, 0] = 5
    end["ids"] = end["ids"] + 1
    first = mh.Patch.between(start, middle, whole=["head", *((whole,) if whole else ())])
    second = mh.Patch.between(middle, end)
    jump = first.then(second)
    assert same_bits(_applied(jump, start), end)
    with pytest.raises(mh.PatchError, match="different models, of 65 and 61 weights"):
        second.then(first)
    with pytest.raises(mh.PatchError, match="adds tensors has no inverse"):
        jump.inverse()


def test_patches_in_the_wrong_order_or_on_the_wrong_base_are_refused() -> None:
    states, patches = some_patches()
    with pytest.raises(mh.PatchError, match=r"do not follow each other: .*not what the first"):
        patches[0].then(patches[2])
    with pytest.raises(TypeError, match="following must be a Patch, got str"):
        patches[0].then("patch")  # pyright: ignore[reportArgumentType]
    other = mh.Patch.between(small_state(), small_state(seed=3))
    with pytest.raises(mh.PatchError, match="different models"):
        patches[0].then(other)
    for k, state in enumerate(states):
        for j, patch in enumerate(patches):
            served = copy_of(state)
            if j != k:
                with pytest.raises(mh.PatchError):
                    patch.apply(served)
            if j not in (k, k - 1):  # it does not start there, nor has it led there
                with pytest.raises(mh.PatchError, match="full copy"):
                    mh.WeightReceiver(served).receive([_without_originals(patch)])
            assert same_bits(served, state)


@given(data=st.data())
def test_a_receiver_at_any_version_catches_up_with_as_few_patches_as_possible(
    data: st.DataObject,
) -> None:
    states, patches = some_patches()
    here = data.draw(st.integers(0, 5))
    goal = data.draw(st.integers(1, 5))
    others = data.draw(st.permutations([p for k, p in enumerate(patches) if k != goal - 1]))
    served = copy_of(states[here])
    receiver = mh.WeightReceiver(served)
    patch = receiver.receive([*others, patches[goal - 1]])
    assert same_bits(served, states[goal])
    assert receiver.version == patches[goal - 1].version
    receiver.verify()
    assert (patch.count == 0) == (here == goal)
    jump = patches[0].then(patches[1])
    found = mh.Patch.chain([*patches[:4], jump, patches[4]], patches[0].base_version)
    assert same_bits(_applied(found, states[0]), states[5])


def test_a_folder_and_the_advice_to_take_a_full_copy(tmp_path: Path) -> None:
    states, patches = some_patches()
    for k, patch in enumerate(patches):
        patch.save(tmp_path / f"{k}.safetensors", originals=k % 2 == 0)
    save_file(states[0], tmp_path / "9-model.safetensors")  # not a patch
    patches[0].save(tmp_path / ".mirrorhead-tmp-abcdefgh-9.safetensors")  # being written
    receiver = mh.WeightReceiver(copy_of(states[1]))
    receiver.receive(tmp_path)
    assert receiver.version == patches[-1].version
    (tmp_path / "2.safetensors").unlink()
    late = copy_of(states[1])
    with pytest.raises(mh.PatchError, match=r"no chain of the 4 patches leads .* full copy"):
        mh.WeightReceiver(late).receive(tmp_path)
    assert same_bits(late, states[1])
    strange = copy_of(states[1])
    strange["scale"] += 1
    with pytest.raises(mh.PatchError, match=r"none of the 4 patches starts .* full copy"):
        mh.WeightReceiver(strange).receive(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(mh.PatchError, match="holds no patches"):
        mh.Patch.chain(empty)
    with pytest.raises(mh.PatchError, match="must be a folder or a list"):
        mh.Patch.chain(tmp_path / "0.safetensors")
    with pytest.raises(ValueError, match="at least one patch"):
        mh.Patch.chain([])
    (tmp_path / "4.safetensors").write_bytes((tmp_path / "4.safetensors").read_bytes()[:-3])
    with pytest.raises(mh.PatchError, match="cannot be read"):
        mh.Patch.chain([tmp_path / "4.safetensors"])


def test_a_receiver_whose_model_was_changed_by_others_is_refused() -> None:
    states, patches = some_patches()
    served = copy_of(states[0])
    receiver = mh.WeightReceiver(served)
    place = int(next(iter(patches[0].tensors["embed.weight"].index)))  # pyright: ignore
    served["embed.weight"].view(-1)[place] += 1
    before = copy_of(served)
    with pytest.raises(mh.PatchError, match="was changed by others"):
        receiver.receive(patches)
    assert same_bits(served, before)
    with pytest.raises(mh.PatchError, match=r"'embed.weight' has other bits"):
        receiver.verify()


def test_another_layout_is_refused_before_a_bit_is_written() -> None:
    states, patches = some_patches()
    wide = {n: t.float() if t.is_floating_point() else t for n, t in copy_of(states[0]).items()}
    fewer = {n: t for n, t in copy_of(states[0]).items() if n != "scale"}
    for served in (wide, fewer):
        before = copy_of(served)
        with pytest.raises(mh.PatchError):
            mh.WeightReceiver(served).receive(patches)
        with pytest.raises(mh.PatchError, match="does not fit"):
            patches[0].apply(served)
        assert same_bits(served, before)


@pytest.mark.slow
def test_the_example_ends_with_one_version() -> None:
    """Three processes; one joins late, one misses patches."""
    script = Path(__file__).parents[2] / "examples" / "weight_sync.py"
    command = [sys.executable, str(script), "--steps", "70"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "all three have version" in done.stdout
    assert "late: 1 full copies" in done.stdout or "late: 2 full copies" in done.stdout


def test_sparse_weights_for_other_readers(tmp_path: Path) -> None:
    """Entries with absolute values: an index_copy_ into flat weights gives the same bits."""
    states, patches = some_patches()
    jump = mh.Patch.chain(patches)
    state = copy_of(states[0])
    for name, entry in jump.to_sparse().items():
        assert entry._fields == ("name", "full_shape", "indices", "values")
        assert entry.name == name and entry.indices.dtype == torch.int32
        assert entry.full_shape == tuple(state[name].shape)
        assert entry.indices.is_contiguous() and entry.values.is_contiguous()
        state[name].view(-1).index_copy_(0, entry.indices.long(), entry.values)
    state["head.weight"] = state["embed.weight"]  # tied
    assert same_bits(state, states[-1])
    jump.to_safetensors(tmp_path / "sparse")
    with safe_open(tmp_path / "sparse", framework="pt") as opened:
        about = opened.metadata()
        stored = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    assert (about["base_version"], about["version"]) == (jump.base_version, jump.version)
    for name, entry in jump.to_sparse().items():
        assert json.loads(about["shapes"])[name] == list(entry.full_shape)
        assert torch.equal(stored[f"{name}.indices"], entry.indices)
        assert torch.equal(stored[f"{name}.values"], entry.values)
    with pytest.raises(FileExistsError):
        jump.to_safetensors(tmp_path / "sparse")
    huge = TensorInfo("I8", (2**16, 2**16))
    nothing = torch.zeros(0, dtype=torch.int64)
    part = TensorPatch(huge, nothing, nothing.to(torch.int8), None, "0" * 32, "0" * 32)
    with pytest.raises(mh.PatchError, match="too many for int32"):
        mh.Patch({"w": part}, 0).to_sparse()


# --- Resuming -------------------------------------------------------------------------------


def _through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("pending", [True, False])
def test_a_resumed_trainer_keeps_its_versions(pending: bool) -> None:
    model, optimizer, sync, served = set_up()
    receiver = mh.WeightReceiver(served)
    train(model, optimizer, 2)
    receiver.receive([sync.collect()])
    train(model, optimizer, 2)
    if pending:
        sync.collect(commit=False)  # published or not: the process dies before the commit
    saved = _through_a_file((model.state_dict(), sync.state_dict()))
    again = Net(5)
    fresh = mh.WeightSync(again)
    with pytest.raises(mh.PatchError, match=r"the sync cannot resume: .*full copy"):
        fresh.load_state_dict(saved[1])
    again.load_state_dict(saved[0])
    resumed = mh.WeightSync(again)
    assert resumed.version != sync.version
    resumed.load_state_dict(saved[1])
    assert (resumed.version, resumed.number) == (sync.version, 1)
    receiver.receive([resumed.collect()])
    assert same_bits(served, cast(model, torch.bfloat16))
    other = mh.WeightSync(nn.Linear(2, 2))
    with pytest.raises(mh.PatchError, match=r"the checkpoint has no tensor 'bias'; and \d+ more"):
        other.load_state_dict(saved[1])
    with pytest.raises(mh.PatchError, match="was sent as BF16, now as F16"):
        mh.WeightSync(again, torch.float16).load_state_dict(saved[1])
