"""Patches of tensors in memory: any strides and views, and failures in the middle."""

from __future__ import annotations

import itertools
import threading
from collections import UserDict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import mirrorhead as mh
from mirrorhead.patches.checkpoints import bits
from mirrorhead.patches.in_place import overlaps_itself
from patch_cases import State, copy_of, same_bits

SIZE = 40  # numbers in the memory that the views share
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.int32]


def addresses(tensor: Tensor) -> list[int]:
    """The address of each element, in order."""
    places = itertools.product(*map(range, tensor.shape))
    steps = [stride * tensor.element_size() for stride in tensor.stride()]
    return [
        tensor.data_ptr() + sum(i * step for i, step in zip(place, steps, strict=True))
        for place in places
    ]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Shape, strides and offset of a view of a memory of SIZE numbers."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    strides = [draw(st.integers(0, 13)) for _ in shape]
    for axis in range(len(shape)):  # shorten what would lead out of the memory
        while sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n) >= SIZE:
            strides[axis] //= 2
            if not strides[axis]:
                break
    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n)
    return tuple(shape), tuple(strides), draw(st.integers(0, SIZE - 1 - reach))


@settings(max_examples=500)
@given(layouts())
def test_a_tensor_overlaps_itself_if_two_elements_have_one_address(layout: Any) -> None:
    tensor = torch.zeros(SIZE).as_strided(*layout)
    found = addresses(tensor)
    assert overlaps_itself(tensor) == (len(set(found)) < len(found))


def consistent(before: State, after: State) -> bool:
    """Whether the views can hold these values: no changed one overlaps itself or disagrees."""
    wanted: dict[int, Any] = {}
    for name, view in before.items():
        values = bits(after[name].reshape(-1)).tolist()
        changed = bits(after[name].reshape(-1)).ne(bits(view.reshape(-1))).any()
        if changed and overlaps_itself(view):
            return False
        for address, value in zip(addresses(view), values, strict=True):
            if wanted.setdefault(address, value) != value:
                return False
    return True


@st.composite
def views(draw: st.DrawFn) -> tuple[Tensor, State, State]:
    """A memory, several views of it or of copies, and what they should hold.

    The values are often such as the views can hold.
    """
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def numbers() -> Tensor:
        return torch.randint(-9, 9, (SIZE,), generator=generator).to(dtype)

    memory, other = numbers(), numbers()
    if draw(st.booleans()):  # change one number only
        place = draw(st.integers(0, SIZE - 1))
        other = torch.where(torch.arange(SIZE) == place, other.float(), memory.float()).to(dtype)
    given = draw(st.lists(layouts(), min_size=1, max_size=4, unique=True))
    state = {f"t{i}": memory.as_strided(*layout) for i, layout in enumerate(given)}
    wanted = other if draw(st.booleans()) else memory
    after = {f"t{i}": wanted.as_strided(*layout).clone() for i, layout in enumerate(given)}
    if draw(st.booleans()):  # one of them changes in its own way
        name = draw(st.sampled_from(sorted(after)))
        own = torch.randint(-9, 9, after[name].shape, generator=generator).to(dtype)
        after[name] = own
    return memory, state, after


@pytest.mark.slow
@settings(max_examples=600)
@given(views(), st.booleans())
def test_views_get_their_values_or_an_error_comes_before_any_write(
    case: tuple[Tensor, State, State], whole: bool
) -> None:
    memory, state, after = case
    before = memory.clone()
    patch = mh.Patch.between(copy_of(state), after, whole="*" if whole else ())
    possible = consistent(state, after)
    try:
        patch.apply(state)
    except mh.PatchError:
        assert not possible
        assert torch.equal(bits(memory), bits(before))
    else:
        assert possible
        assert same_bits(state, after)
        patch.revert(state)
        assert torch.equal(bits(memory), bits(before))


class TestOverlap:
    def refused(self, target: State, tuned: State, words: str) -> None:
        patch = mh.Patch.between(copy_of(target), tuned)
        before = copy_of(target)
        with pytest.raises(mh.PatchError, match=words):
            patch.apply(target)
        assert same_bits(target, before)

    def test_one_entry_of_an_expanded_tensor(self) -> None:
        target = {"fine": torch.zeros(2), "w": torch.zeros(1).expand(4)}
        tuned = {"fine": torch.ones(2), "w": torch.tensor([0.0, 1.0, 0.0, 0.0])}
        self.refused(target, tuned, r"elements of 'w' share memory, as in an expanded tensor")

    def test_an_expanded_buffer_of_a_model(self) -> None:
        model = nn.Module()
        model.register_buffer("scale", torch.ones(3, 1).expand(3, 4))
        tuned = copy_of(model.state_dict())
        tuned["scale"][1, 2] = 2
        patch = mh.Patch.between(copy_of(model.state_dict()), tuned)
        with pytest.raises(mh.PatchError, match="elements of 'scale' share memory"):
            patch.apply(model)
        assert torch.equal(model.get_buffer("scale"), torch.ones(3, 4))

    def test_strides_that_meet(self) -> None:
        target = {"w": torch.zeros(8).as_strided((3, 3), (2, 1))}
        tuned = {"w": torch.zeros(3, 3)}
        tuned["w"][0, 0] = 1  # itself at one place only
        self.refused(target, tuned, "elements of 'w' share memory")

    def test_a_view_that_the_patch_does_not_name(self) -> None:
        memory = torch.zeros(6)
        target = {"a": memory[:4], "b": memory[2:]}
        tuned = {"a": torch.tensor([0.0, 0.0, 0.0, 1.0]), "b": torch.zeros(4)}
        self.refused(target, tuned, r"'a' overlaps in memory with 'b'|'b' overlaps .* with 'a'")

    def test_arrays_whose_storages_overlap(self) -> None:
        memory = np.zeros(6, np.float32)
        target = {"a": torch.from_numpy(memory[:4]), "b": torch.from_numpy(memory[2:])}
        tuned = {"a": torch.tensor([0.0, 0.0, 0.0, 1.0]), "b": torch.zeros(4)}
        self.refused(target, tuned, "overlaps in memory")

    @pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
    def test_a_file_mapped_for_reading(self, tmp_path: Path) -> None:
        """Writing there would end the process, after the first tensor was written."""
        np.save(tmp_path / "w.npy", np.zeros((3, 5000), np.float32))
        mapped = {
            mode: torch.from_numpy(np.load(tmp_path / "w.npy", mmap_mode=mode))[1:]
            for mode in ("r", "c")
        }
        tuned = {"a": torch.ones(2), "w": torch.ones(2, 5000)}
        target = {"a": torch.zeros(2), "w": mapped["r"]}
        self.refused(target, tuned, "'w' lies in memory that cannot be written, as a file mapped")
        target["w"] = mapped["c"]  # copied on write
        mh.Patch.between(copy_of(target), tuned).apply(target)
        assert same_bits(target, tuned)
        assert not np.load(tmp_path / "w.npy").any()

    def test_views_that_cannot_disagree_are_patched(self) -> None:
        memory = torch.zeros(6, 4)
        target = {"q": memory[:, :2], "k": memory[:, 2:], "tied": memory.t(), "all": memory}
        tuned = torch.arange(24.0).reshape(6, 4)
        wanted = {"q": tuned[:, :2], "k": tuned[:, 2:], "tied": tuned.t(), "all": tuned}
        patch = mh.Patch.between(copy_of(target), copy_of(wanted))
        patch.apply(target)
        assert same_bits(target, wanted)
        patch.revert(target)
        assert not memory.any()

    def test_an_expanded_tensor_that_does_not_change_is_no_obstacle(self) -> None:
        target = {"w": torch.zeros(2), "ids": torch.arange(3).expand(4, 3)}
        patch = mh.Patch.between(copy_of(target), {**copy_of(target), "w": torch.ones(2)})
        patch.apply(target)
        assert target["w"].tolist() == [1, 1]

    def test_inference_tensors(self) -> None:
        with torch.inference_mode():
            made = torch.zeros(2)
        target = {"a": torch.zeros(2), "b": made}
        tuned = {"a": torch.ones(2), "b": torch.ones(2)}
        self.refused(target, tuned, r"'b' was made under torch\.inference_mode\(\)")
        with torch.inference_mode():
            mh.Patch.between(copy_of(target), tuned).apply(target)
            assert made.tolist() == [1, 1]


class Failing(Tensor):
    """A tensor that cannot be written: a write fails before it changes anything, or halfway."""

    place: ClassVar[int] = 0  # where it lies; copies of it can be written
    halves: ClassVar[bool] = False
    most: ClassVar[int] = 10**9  # number of writes that fail

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        here = func is Tensor.__setitem__ and args[0].data_ptr() == Failing.place
        if here and Failing.most > 0:
            Failing.most -= 1
            if Failing.halves:
                plain = args[0].as_subclass(Tensor)
                plain.view(-1)[0] = 77
            raise OSError("read-only memory")
        return super().__torch_function__(func, types, args, kwargs or {})


def failing(tensor: Tensor, halves: bool, most: int = 10**9) -> Tensor:
    """The same memory, whose first `most` writes fail."""
    Failing.place, Failing.halves, Failing.most = tensor.data_ptr(), halves, most
    return tensor.as_subclass(Failing)


@pytest.mark.parametrize("action", ["apply", "revert"])
@pytest.mark.parametrize("bad", ["a", "b", "c"])
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("whole", [(), "*"])
def test_all_or_nothing_wherever_a_write_fails(
    action: str, bad: str, halves: bool, whole: Any
) -> None:
    base = {name: torch.zeros(4) for name in "abc"}
    tuned = {name: torch.ones(4) for name in "abc"}
    patch = mh.Patch.between(base, tuned, whole=whole)
    state = copy_of(base if action == "apply" else tuned)
    before = copy_of(state)
    # What was half written is put back; what was not written at all need not be.
    state[bad] = failing(state[bad], halves, 1 if halves else 10**9)
    with pytest.raises(OSError, match="read-only memory"):
        getattr(patch, action)(state)
    state[bad] = state[bad].as_subclass(Tensor)
    assert same_bits(state, before)


def test_what_cannot_be_put_back_is_named_and_all_others_are() -> None:
    base = {name: torch.zeros(4) for name in "abc"}
    patch = mh.Patch.between(base, {name: torch.ones(4) for name in "abc"})
    state = copy_of(base)
    state["b"] = failing(state["b"], halves=True)
    with pytest.raises(RuntimeError, match="the old values of 'b' could not be put back") as caught:
        patch.apply(state)
    assert isinstance(caught.value.__cause__, OSError)
    assert not state["a"].any() and not state["c"].any()


class Register(UserDict[str, Tensor]):
    """A mapping that refuses to change one of its entries."""

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        if name == "head.b":
            raise OSError("the register is full")
        super().__setitem__(name, tensor)

    def __delitem__(self, name: str) -> None:
        if name == "head.z":
            raise OSError("the register is locked")
        super().__delitem__(name)


@pytest.mark.parametrize("name", ["head.b", "head.z"])
def test_tensors_that_are_added_or_removed_are_part_of_all_or_nothing(name: str) -> None:
    base = {"w": torch.zeros(3)}
    tuned = {"w": torch.ones(3), "head.a": torch.ones(1), name: torch.ones(2)}
    patch = mh.Patch.between(base, tuned, whole="head.*")
    state: Any = Register(copy_of(base))
    if name == "head.b":
        with pytest.raises(OSError, match="full"):
            patch.apply(state)
        assert same_bits(dict(state), base)
    else:
        patch.apply(state)
        with pytest.raises(OSError, match="locked"):
            patch.revert(state)
        assert same_bits(dict(state), tuned)


def test_an_interrupt_between_two_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    base = {name: torch.zeros(4) for name in "abc"}
    patch = mh.Patch.between(base, {name: torch.ones(4) for name in "abc"})

    class Interrupted(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found = super().__torch_function__(func, types, args, kwargs or {})
            here = func is Tensor.__setitem__ and args[0].data_ptr() == state["b"].data_ptr()
            if here and not interrupts:
                interrupts.append(func)
                raise KeyboardInterrupt
            return found

    interrupts: list[Any] = []
    state = copy_of(base)
    state["b"] = state["b"].as_subclass(Interrupted)
    with pytest.raises(KeyboardInterrupt):
        patch.apply(state)
    state["b"] = state["b"].as_subclass(Tensor)
    assert same_bits(state, base)


def test_a_lock_keeps_forward_passes_of_other_threads_whole() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    tuned = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    patch = mh.Patch.between(copy_of(model.state_dict()), tuned)
    x, lock, ended = torch.ones(8), threading.Lock(), threading.Event()
    outputs: list[Tensor] = []

    def serve() -> None:
        while not ended.is_set() or len(outputs) < 20:
            with lock, torch.inference_mode():
                outputs.append(model(x))

    thread = threading.Thread(target=serve)
    thread.start()
    expected = [model(x)]
    for _ in range(20):
        with lock:
            patch.apply(model)
        with lock:
            patch.revert(model)
    ended.set()
    thread.join()
    patch.apply(model)
    expected.append(model(x))
    assert all(any(torch.equal(out, known) for known in expected) for out in outputs)
