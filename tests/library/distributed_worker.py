"""What each process of test_distributed.py runs: scenarios that raise if their law is broken."""

from __future__ import annotations

import copy
import faulthandler
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import load, save  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mirrorhead import (
    CenteredAdam,
    Grouped,
    KSupport,
    MirrorAdam,
    MirrorDescent,
    Schatten,
    SteepestDescent,
    WeightReceiver,
    WeightSync,
    attention_param_groups,
)

WORLD = 2
BATCH = 8
STEPS = 6
# Learning rates that move the weights by some per cent in STEPS steps.
LR = {1.1: 1e-2, 1.5: 5e-2, 2: 1e-1, 3: 3e-2}

Build = Callable[[nn.Module], Optimizer]


class Model(nn.Module):
    """Attention, whose parameters over two processes give even, uneven and empty shards."""

    def __init__(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(6, 8)
        # No bias: the key's has no gradient but rounding, which Adam would blow up.
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True, bias=False)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)  # 2 rows and 1
        self.scale = nn.Parameter(torch.ones(1))  # 1 weight and none
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, 6) -> (batch, 3)
        h = self.embed(x).tanh()
        h = self.norm(h + self.attn(h, h, h, need_weights=False)[0])
        return self.scale * self.head(h.mean(1))


class MLP(nn.Module):
    """What tensor parallelism shards by column and by row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 3)
        self.to(torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x.mean(1)).relu())


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(BATCH, 4, 6, generator=generator)
    return x, torch.randint(3, (BATCH,), generator=generator)


def backward(model: nn.Module, step: int, part: slice = slice(None)) -> None:
    x, y = batch(step)
    x = x.to(next(model.parameters()).dtype)
    model.zero_grad()
    nn.functional.cross_entropy(model(x[part]), y[part]).backward()


def train(
    model: nn.Module, optimizer: Optimizer, steps: range = range(STEPS), part: slice = slice(None)
) -> None:
    for step in steps:
        backward(model, step, part)
        for param in model.parameters():
            if part != slice(None) and getattr(param, "average_me", False):
                assert param.grad is not None
                dist.all_reduce(param.grad)
                param.grad /= WORLD
        optimizer.step()


def mine() -> slice:
    """This process's part of a batch."""
    size = BATCH // WORLD
    return slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)


def shard(model: nn.Module, **options: Any) -> nn.Module:
    """FSDP2, in two units if the model has attention."""
    if isinstance(model, Model):
        fully_shard(model.attn, **options)
    fully_shard(model, **options)
    return model


def whole(model: nn.Module) -> dict[str, Tensor]:
    """All weights, gathered; those of each process must be the same to the bit."""
    weights = {}
    for name, param in model.named_parameters():
        full = param.full_tensor() if isinstance(param, DTensor) else param
        weights[name] = full.detach().clone()
        first = weights[name].clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, weights[name]), f"the processes differ in {name}"
    return weights


def assert_like_one_process(model: nn.Module, build: Build, reference: nn.Module) -> None:
    """The trained model has the weights of a single process that sees the whole batch."""
    start = copy.deepcopy(reference.state_dict())
    train(reference, build(reference))
    for name, expected in reference.named_parameters():
        moved = float((expected.detach() - start[name]).abs().max())
        assert moved > 1e-3 * float(start[name].abs().max()), f"{name} hardly moves: {moved:.1e}"
    assert_close(whole(model), dict(reference.named_parameters()))


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Each tensor to 1e-9 of its size in float64; in float32 all of them to 1e-6 together.

    Gradients summed in another order differ by 1e-7 in float32, and so do the duals; at
    p = 1.1 a weight is the tenth power of its dual, which makes 1e-6 of the unluckiest.
    """
    assert got.keys() == expected.keys()
    square = total = 0.0
    for name, value in expected.items():
        value = value.detach()
        error = (got[name] - value).double()
        if value.dtype == torch.float64:
            allowed = 1e-9 * float(value.abs().max())
            worst = float(error.abs().max())
            assert worst <= allowed, f"{name}: off by {worst:.1e}, allowed {allowed:.1e}"
        square += float(error.square().sum())
        total += float(value.double().square().sum())
    relative = (square / total) ** 0.5
    assert relative <= 1e-6, f"off by {relative:.1e} of the weights' norm"


def descent(**options: Any) -> Build:
    options = {"geometry": 1.1, **options}
    options = {"lr": LR[options["geometry"]], **options}
    return lambda model: MirrorDescent(model.named_parameters(), **options)


def adam(**options: Any) -> Build:
    return lambda model: MirrorAdam(
        model.named_parameters(), **{"lr": 1e-2, "geometry": 1.1, **options}
    )


def centered(**options: Any) -> Build:
    return lambda model: CenteredAdam(model.named_parameters(), 1.5, **options)


def whole_geometry(psi: Any) -> Build:
    return lambda model: MirrorDescent(model.named_parameters(), 0.1, psi, momentum=0.5)


def spectral(model: nn.Module) -> Optimizer:
    """The exact polar factor of matrices, signs of vectors."""
    named = list(model.named_parameters())
    groups = [
        {"params": [x for x in named if x[1].ndim == 2], "geometry": Schatten(float("inf"))},
        {"params": [x for x in named if x[1].ndim != 2]},
    ]
    return SteepestDescent(groups, 1e-2, momentum=0.5)


def mixed(cls: Any = MirrorDescent, **options: Any) -> Build:
    """p = 1.1 for the attention's weights, which keep a dual, and p = 2 for the rest."""
    options = {"lr": 1e-2, **options}
    return lambda model: cls(attention_param_groups(model, geometry=1.1, rest=2.0), **options)


def every_option() -> Iterator[tuple[str, Build]]:
    for p in (1.1, 1.5, 2, 3):
        for normalize in (None, "tensor", "global"):
            for momentum in (0, 0.5):
                options: dict[str, Any] = {
                    "geometry": p,
                    "normalize": normalize,
                    "momentum": momentum,
                    "weight_decay": 0.1 if momentum else 0,
                    "nesterov": momentum > 0 and normalize is None,
                }
                yield f"MirrorDescent({options})", descent(**options)
    for p in (1.1, 2):
        for decay in (0, 0.1):
            options = {"geometry": p, "weight_decay": decay}
            yield f"MirrorAdam({options})", adam(**options)
    for options in ({"geometry": 1.1, "normalize": "global", "momentum": 0.5}, {"geometry": 3}):
        yield f"MirrorDescent({options}), loop", descent(**options, foreach=False)
    yield "MirrorAdam, loop", adam(foreach=False)
    yield "MirrorAdam, centred", centered(reach=0.3, total_steps=8)
    # The third step passes the reach: the scale is the maximum over all shards.
    yield (
        "MirrorAdam, centred, beyond its reach",
        centered(reach=0.1, total_steps=3),
    )
    yield "MirrorDescent, centred", descent(center="init", geometry=1.5, lr=0.5, momentum=0.5)
    yield (
        "SteepestDescent, signs",
        lambda model: SteepestDescent(
            model.named_parameters(), 1e-2, momentum=0.5, weight_decay=0.1
        ),
    )
    yield "SteepestDescent, matrices gathered", spectral
    for psi in (Grouped(1.5, dim=0), KSupport(0.5)):
        yield f"MirrorDescent, {psi}", whole_geometry(psi)
    yield "MirrorDescent, mixed groups", mixed(normalize="global", momentum=0.5)
    yield "MirrorAdam, mixed groups", mixed(MirrorAdam)


# --- scenarios: each takes a directory of its own -------------------------------------------


def ddp_is_one_process(_: Path) -> None:
    for dtype in (torch.float64, torch.float32):
        for label, build in every_option():
            with naming(f"{label}, {dtype}"):
                model = Model(dtype)
                train(DistributedDataParallel(model), build(model), part=mine())
                assert_like_one_process(model, build, Model(dtype))


def zero_redundancy_is_one_process(_: Path) -> None:
    # Here, as importing it warns that torch.jit is deprecated.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    choices: list[tuple[Any, dict[str, Any]]] = [
        (MirrorDescent, {"lr": 1e-2, "normalize": "tensor", "momentum": 0.5}),
        (MirrorAdam, {"lr": 1e-2, "geometry": 1.1}),
    ]
    for cls, options in choices:
        model = Model()
        wrapped = DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), cls, **options)
        train(wrapped, optimizer, part=mine())
        reference = Model()
        train(reference, cls(reference.parameters(), **options))
        assert_close(whole(model), dict(reference.named_parameters()))
    model, reference = Model(), Model()
    wrapped = DistributedDataParallel(model)
    groups = attention_param_groups(model, geometry=1.1, named=False)
    train(wrapped, ZeroRedundancyOptimizer(groups, MirrorAdam, lr=1e-2), part=mine())
    train(reference, MirrorAdam(attention_param_groups(reference, geometry=1.1), lr=1e-2))
    assert_close(whole(model), dict(reference.named_parameters()))


def fsdp_is_one_process(_: Path) -> None:
    for dtype in (torch.float64, torch.float32):
        for label, build in every_option():
            with naming(f"{label}, {dtype}"):
                model = shard(Model(dtype))
                train(model, build(model), part=mine())
                assert_like_one_process(model, build, Model(dtype))


def shards_are_uneven_and_empty(_: Path) -> None:
    sizes = {
        name: (param.to_local().numel(), param.numel())
        for name, param in shard(Model()).named_parameters()
        if isinstance(param, DTensor)
    }
    first = dist.get_rank() == 0
    assert len(sizes) == len(list(Model().parameters()))
    assert sizes["embed.weight"] == (24, 48)
    assert sizes["head.bias"] == (2 if first else 1, 3)
    assert sizes["scale"] == (1 if first else 0, 1)


def plain_and_sharded_share_a_group(_: Path) -> None:
    for label, build in [
        ("tensor", descent(geometry=1.5, normalize="tensor")),
        ("global", descent(geometry=1.1, normalize="global", momentum=0.5)),
        ("adam", adam()),
    ]:
        with naming(label):
            model = Model()
            plain = {model.embed.weight, model.norm.bias, model.scale}
            for param in plain:
                param.average_me = True  # pyright: ignore[reportAttributeAccessIssue]
            shard(model, ignored_params=plain)
            kinds = {isinstance(param, DTensor) for param in model.parameters()}
            assert kinds == {True, False}
            train(model, build(model), part=mine())
            assert_like_one_process(model, build, Model())


def unused_parameter_stays(_: Path) -> None:
    for build in (descent(normalize="global"), adam()):
        model, reference = Model(), Model()
        start = torch.ones(5, dtype=torch.float64)
        for one in (model, reference):
            one.register_parameter("unused", nn.Parameter(start.clone()))
        shard(model)
        train(model, build(model), part=mine())
        train(reference, build(reference))
        assert_close(whole(model), dict(reference.named_parameters()))
        assert torch.equal(whole(model)["unused"], start)


def hybrid_sharding_is_one_process(_: Path) -> None:
    for shape in ((2, 1), (1, 2)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        for build in (descent(normalize="global", momentum=0.5), adam()):
            with naming(f"mesh {shape}"):
                model = shard(Model(), mesh=mesh)
                train(model, build(model), part=mine())
                assert_like_one_process(model, build, Model())


def tensor_parallel_is_one_process(_: Path) -> None:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for data, model_parallel in ((1, 2), (2, 1)):
        mesh = init_device_mesh("cpu", (data, model_parallel), mesh_dim_names=("data", "model"))
        for build in (
            descent(geometry=1.5, normalize="tensor"),
            descent(normalize="global"),
            adam(),
        ):
            with naming(f"mesh ({data}, {model_parallel})"):
                model = parallelize_module(MLP(), mesh["model"], plan)
                model = shard(model, mesh=mesh["data"])
                train(model, build(model), part=slice(None) if data == 1 else mine())
                assert_like_one_process(model, build, MLP())


def strided_shards_are_summed(_: Path) -> None:
    """FSDP over tensor parallelism shards by `_StridedShard`, which is no `Shard`."""
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = DeviceMesh("cpu", list(range(WORLD)))
    torch.manual_seed(0)
    weight, grad = torch.randn(2, 8, 3, dtype=torch.float64)
    for options in (
        {"geometry": 1.5, "normalize": "tensor"},
        {"geometry": 1.5, "normalize": "global"},
    ):
        moved = []
        for place in ([Shard(0)], [_StridedShard(0, split_factor=2)]):
            param = nn.Parameter(distribute_tensor(weight, mesh, place))
            param.grad = distribute_tensor(grad, mesh, place)
            MirrorDescent([param], lr=0.1, **options).step()
            assert isinstance(param, DTensor)
            moved.append(param.full_tensor().detach())
        torch.testing.assert_close(*moved, rtol=1e-12, atol=0)


def gradient_may_be_laid_out_otherwise(_: Path) -> None:
    """Whole on every process, or as parts yet to be summed, where the weight is sharded."""
    mesh = DeviceMesh("cpu", list(range(WORLD)))
    torch.manual_seed(0)
    weight, grad = torch.randn(2, 3, 4, dtype=torch.float64)
    expected = nn.Parameter(weight.clone())
    expected.grad = grad
    MirrorDescent([expected], lr=0.1, geometry=1.5, normalize="tensor").step()
    parts = grad * (0.25 if dist.get_rank() == 0 else 0.75)
    for other in (
        distribute_tensor(grad, mesh, [Replicate()]),
        distribute_tensor(grad, mesh, [Shard(1)]),
        DTensor.from_local(parts, mesh, [Partial()]),
    ):
        param = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
        param.grad = other
        MirrorDescent([param], lr=0.1, geometry=1.5, normalize="tensor").step()
        assert isinstance(param, DTensor)
        torch.testing.assert_close(param.full_tensor().detach(), expected.detach())


def poison(model: nn.Module, name: str) -> None:
    """A gradient that is infinite in one weight of the first process."""
    grad = model.get_parameter(name).grad
    assert isinstance(grad, DTensor)
    if dist.get_rank() == 0:
        grad.to_local().view(-1)[0] = torch.inf


def error_of(optimizer: Optimizer) -> str:
    """What the step raises."""
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "(no error)"


def nonfinite_raises_everywhere(_: Path) -> None:
    for name in ("scale", "attn.in_proj_weight", "head.bias"):
        for build in (descent(normalize="global"), descent(geometry=2), adam(), mixed()):
            model = shard(Model())
            optimizer = build(model)
            train(model, optimizer, range(2), part=mine())
            backward(model, 2, mine())
            poison(model, name)
            message = error_of(optimizer)
            assert f"gradient of '{name}'" in message, message
            assert message.count("gradient of") == 1, message
            assert all(weight.isfinite().all() for weight in whole(model).values())


def nonfinite_skips_everywhere(_: Path) -> None:
    for name in ("scale", "attn.in_proj_weight", "head.bias"):
        for build in (
            descent(normalize="global", momentum=0.5, error_if_nonfinite=False),
            adam(error_if_nonfinite=False),
        ):
            model, reference = shard(Model()), Model()
            optimizer, plain = build(model), build(reference)
            train(model, optimizer, range(2), part=mine())
            train(reference, plain, range(2))
            backward(model, 2, mine())
            backward(reference, 2)
            poison(model, name)
            reference.get_parameter(name).grad.view(-1)[0] = torch.inf  # pyright: ignore
            optimizer.step()
            plain.step()
            assert_close(whole(model), dict(reference.named_parameters()))


def ddp_nonfinite_raises_everywhere(_: Path) -> None:
    for build in (descent(), adam()):
        model = Model()
        optimizer, wrapped = build(model), DistributedDataParallel(model)
        before = whole(model)
        x = batch(0)[0].double()
        if dist.get_rank() == 1:
            x[-1] = torch.nan
        wrapped(x[mine()]).sum().backward()
        message = error_of(optimizer)
        assert "'embed.weight'" in message, message
        assert "is not finite" in message, message
        after = whole(model)
        assert torch.equal(after["embed.weight"], before["embed.weight"])
        assert all(weight.isfinite().all() for weight in after.values())


def resumes_to_the_bit(wrap: Callable[[nn.Module], nn.Module], directory: Path) -> None:
    cases = {
        "descent": descent(momentum=0.5, weight_decay=0.1),
        "normalized": descent(geometry=1.5, normalize="global"),
        "no state": descent(geometry=3),
        "sgd": descent(geometry=2),
        "adam": adam(weight_decay=0.1),
        "adamw": adam(geometry=2),
        "mixed": mixed(),
        "mixed adam": mixed(MirrorAdam),
        "tensor lr": descent(lr=torch.tensor(1e-2)),
        "bf16": descent(momentum=0.5),
        "bf16, geometry=3": descent(geometry=3),
        "bf16, adam": adam(),
    }
    for label, build in cases.items():
        dtype = torch.bfloat16 if "bf16" in label else torch.float32
        for flatten in (False, True):
            with naming(f"{label}, flatten={flatten}"):
                options = StateDictOptions(flatten_optimizer_state_dict=flatten)
                path = directory / f"{label}-{flatten}"
                straight = wrap(Model(dtype))
                train(straight, build(straight), part=mine())

                model = wrap(Model(dtype))
                optimizer = build(model)
                train(model, optimizer, range(STEPS // 2), part=mine())
                weights, state = get_state_dict(model, optimizer, options=options)
                save({"model": weights, "optimizer": state}, checkpoint_id=path)

                model = wrap(Model(dtype, seed=1))
                optimizer = build(model)
                weights, state = get_state_dict(model, optimizer, options=options)
                saved = {"model": weights, "optimizer": state}
                load(saved, checkpoint_id=path)
                set_state_dict(
                    model,
                    optimizer,
                    model_state_dict=saved["model"],
                    optim_state_dict=saved["optimizer"],
                    options=options,
                )
                train(model, optimizer, range(STEPS // 2, STEPS), part=mine())
                assert_equal(whole(model), whole(straight))


def fsdp_resumes_to_the_bit(directory: Path) -> None:
    resumes_to_the_bit(shard, directory)


def ddp_resumes_to_the_bit(directory: Path) -> None:
    resumes_to_the_bit(DistributedDataParallel, directory)


def full_state_moves_between_layouts(_: Path) -> None:
    """Saved whole from FSDP, it goes on in FSDP to the bit, and in one process."""
    options = StateDictOptions(full_state_dict=True)
    for label, build in {"mixed": mixed(momentum=0.5), "adam": adam()}.items():
        with naming(label):
            straight = shard(Model())
            train(straight, build(straight), part=mine())

            model = shard(Model())
            optimizer = build(model)
            train(model, optimizer, range(STEPS // 2), part=mine())
            weights, state = get_state_dict(model, optimizer, options=options)

            again, alone = shard(Model(seed=1)), Model(seed=1)
            for other, part in ((again, mine()), (alone, slice(None))):
                optimizer = build(other)
                set_state_dict(
                    other,
                    optimizer,
                    model_state_dict=copy.deepcopy(weights),
                    optim_state_dict=copy.deepcopy(state),
                    options=options,
                )
                train(other, optimizer, range(STEPS // 2, STEPS), part=part)
            assert_equal(whole(again), whole(straight))
            assert_close(whole(alone), whole(straight))


def a_checkpoint_loads_twice(directory: Path) -> None:
    """Loading adds nothing that the same checkpoint lacks when it is loaded a second time."""
    for label, build in {
        "mixed": mixed(momentum=0.5),
        "geometry=2": descent(geometry=2),
        "adam": adam(),
    }.items():
        with naming(label):
            model = shard(Model(torch.float32))
            optimizer = build(model)
            train(model, optimizer, range(STEPS // 2), part=mine())
            weights, state = get_state_dict(model, optimizer)
            save({"model": weights, "optimizer": state}, checkpoint_id=directory / label)
            train(model, optimizer, range(STEPS // 2, STEPS), part=mine())
            straight = whole(model)
            for _ in range(2):
                weights, state = get_state_dict(model, optimizer)
                saved = {"model": weights, "optimizer": state}
                load(saved, checkpoint_id=directory / label)
                set_state_dict(
                    model,
                    optimizer,
                    model_state_dict=saved["model"],
                    optim_state_dict=saved["optimizer"],
                )
                train(model, optimizer, range(STEPS // 2, STEPS), part=mine())
                assert_equal(whole(model), straight)


def saving_disturbs_nothing(_: Path) -> None:
    """The zero-gradient, zero-lr step by which DCP makes state changes no weight."""
    for label, build in every_option():
        with naming(label):
            model = shard(Model())
            before = whole(model)
            optimizer = build(model)
            get_optimizer_state_dict(model, optimizer)
            assert_equal(whole(model), before)
            rates = {float(group["lr"]) for group in optimizer.param_groups}
            assert rates == {float(group["lr"]) for group in build(Model()).param_groups}
    for build in (descent(geometry=3), descent(geometry=2), descent(geometry=1.5), mixed(), adam()):
        straight, model = shard(Model(torch.float32)), shard(Model(torch.float32))
        train(straight, build(straight), part=mine())
        optimizer = build(model)
        for step in range(STEPS):
            train(model, optimizer, range(step, step + 1), part=mine())
            optimizer.zero_grad()
            get_optimizer_state_dict(model, optimizer)
        assert_equal(whole(model), whole(straight))


def fused_is_one_process(_: Path) -> None:
    build = descent(fused=True, normalize="global")
    for rank in range(WORLD):  # in turn, for the second to find in the cache what is compiled
        if dist.get_rank() == rank:
            reference = Model(torch.float32)
            train(reference, build(reference), range(1))
        dist.barrier()
    model = shard(Model(torch.float32))
    train(model, build(model), part=mine())
    assert_like_one_process(model, build, Model(torch.float32))


def sync_sends_checkpoint_coordinates(_: Path) -> None:
    """A patch of shards is that of the unsharded weights, entry by entry and version by version."""
    for label, sharded in sync_layouts():
        with naming(label):
            model, optimizer = sharded()
            alone = {name: weight.clone() for name, weight in whole(model).items()}
            sync, reference = WeightSync(model), WeightSync(alone)
            served = sync.weights()
            receiver = WeightReceiver(served)
            assert sync.version == reference.version == receiver.version
            for step in range(4):
                # Processes that share a tensor's parts see the same data.
                part = slice(None) if label == "tensor parallel" else mine()
                train(model, optimizer, range(step, step + 1), part=part)
                with torch.no_grad():
                    for name, weight in whole(model).items():
                        alone[name].copy_(weight)
                patch = sync.collect(commit=step != 1)
                expected = reference.collect(commit=step != 1)
                assert (patch.base_version, patch.version) == (
                    expected.base_version,
                    expected.version,
                )
                for name, part in expected.tensors.items():
                    assert (
                        part.index is not None and (index := patch.tensors[name].index) is not None
                    )
                    assert torch.equal(index, part.index), name
                    assert torch.equal(patch.tensors[name].values, part.values), name
                if step != 1:
                    receiver.receive([patch])
                if step == 1:  # the trainer dies before the commit and comes back
                    state = sync.state_dict()
                    sync = WeightSync(model)
                    assert sync.version != reference.version
                    sync.load_state_dict(state)
                    assert (sync.version, sync.number) == (reference.version, 1)
            assert receiver.version == sync.version
            for name, weight in whole(model).items():
                assert torch.equal(served[name], weight.bfloat16()), name


def sync_layouts() -> Iterator[tuple[str, Callable[[], tuple[nn.Module, Optimizer]]]]:
    def fsdp() -> tuple[nn.Module, Optimizer]:
        model = shard(Model(torch.float32))
        return model, adam()(model)

    def hybrid() -> tuple[nn.Module, Optimizer]:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        model = shard(Model(torch.float32), mesh=mesh)
        return model, adam()(model)

    def tensor_parallel() -> tuple[nn.Module, Optimizer]:
        model = MLP().float()
        mesh = init_device_mesh("cpu", (WORLD,))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh, plan)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    yield "fsdp", fsdp
    yield "hybrid", hybrid
    yield "tensor parallel", tensor_parallel


SUITES: dict[str, list[Callable[[Path], None]]] = {
    "ddp": [
        ddp_is_one_process,
        zero_redundancy_is_one_process,
        ddp_nonfinite_raises_everywhere,
    ],
    "fsdp": [shards_are_uneven_and_empty, fsdp_is_one_process],
    "layouts": [
        plain_and_sharded_share_a_group,
        unused_parameter_stays,
        hybrid_sharding_is_one_process,
        tensor_parallel_is_one_process,
        strided_shards_are_summed,
        gradient_may_be_laid_out_otherwise,
    ],
    "nonfinite": [nonfinite_raises_everywhere, nonfinite_skips_everywhere],
    "checkpoint": [
        saving_disturbs_nothing,
        fsdp_resumes_to_the_bit,
        ddp_resumes_to_the_bit,
        a_checkpoint_loads_twice,
        full_state_moves_between_layouts,
    ],
    "sync": [sync_sends_checkpoint_coordinates],
    "fused": [fused_is_one_process],
}


def assert_equal(got: Any, expected: Any, where: str = "") -> None:
    """Equal to the bit, through nested containers."""
    if isinstance(expected, Tensor):
        if isinstance(expected, DTensor):
            got, expected = got.to_local(), expected.to_local()
        assert torch.equal(got, expected), where
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_equal(got[key], value, f"{where} {key}")
    elif isinstance(expected, list):
        for one, other in zip(got, expected, strict=True):
            assert_equal(one, other, where)
    else:
        assert got == expected, where


@contextmanager
def naming(label: str) -> Iterator[None]:
    """Says for which case an error was."""
    try:
        yield
    except Exception as error:
        raise AssertionError(label) from error


def main(rank: int, suite: str, directory: str) -> None:
    """One process of a pair. An error here ends the pair; a collective waits 60 s at most."""
    # What C++ prints before it aborts, and the stack of every Python thread, for the test to show.
    os.dup2(os.open(Path(directory, f"stderr-{rank}"), os.O_CREAT | os.O_WRONLY), 2)
    faulthandler.enable(2)
    torch.set_num_threads(1)
    if Path("/sys/class/net/lo").exists():  # whatever the host's name resolves to
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    for scenario in SUITES[suite]:
        with naming(scenario.__name__):
            scenario(Path(directory) / scenario.__name__)
    # Leave together and at once: after a barrier the first process may close the connections while
    # the other is still inside (pytorch/gloo#155).
    dist.barrier()
    Path(directory, f"left-{rank}").touch()
    deadline = time.monotonic() + 60
    while not all(Path(directory, f"left-{k}").exists() for k in range(WORLD)):
        assert time.monotonic() < deadline, "the other process has not come to the end"
        time.sleep(0.01)
    os._exit(0)
