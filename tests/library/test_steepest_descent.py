"""Steps in any geometry: steepest descent in a norm, mirror descent and Adam in any potential."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mirrorhead as mh
from mirrorhead.synthetic import random_problem

INF = math.inf


class Cosh(mh.Potential):
    """A potential of one's own, entry by entry, which says so nowhere."""

    limit = mh.PNorm(INF)

    def __repr__(self) -> str:
        return "Cosh()"

    def mirror(self, w: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return w.sinh()

    def inverse(self, u: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return u.asinh()

    def value(self, w: Tensor, dims: Any = None) -> Tensor:
        entries = w.cosh() - 1
        return entries.sum() if dims is None else entries.sum(dims)


NORMS: list[mh.Norm] = [
    *(mh.PNorm(p) for p in (1, 1.5, 2, INF)),
    *(mh.Schatten(p) for p in (1, 1.5, INF)),
    *(mh.Grouped(p, dim=1) for p in (1, INF)),
    mh.KSupport(k=3),
]
POTENTIALS: list[mh.Potential] = [
    mh.Schatten(1.2), mh.Grouped(1.2), mh.KSupport(0.3), mh.SoftThreshold(0.1), Cosh(),
    mh.HyperbolicEntropy(0.1), mh.Knee(mh.PNorm(1.1), at=0.5), mh.Schatten(3),
    mh.Centered(mh.PNorm(1.5), at=torch.full((4, 3), 0.1), reach=0.2),
]  # fmt: skip


def trained(optimizer: torch.optim.Optimizer, param: nn.Parameter, gradients: list[Tensor]) -> None:
    for g in gradients:
        param.grad = g.to(param.dtype)
        optimizer.step()


def draw(count: int = 5, shape: tuple[int, ...] = (4, 3)) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    new = lambda: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return new(), [new() for _ in range(count)]


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("norm", NORMS, ids=repr)
def test_steepest_descent_is_its_formula(norm: mh.Norm, nesterov: bool) -> None:
    start, gradients = draw()
    w, m = start.clone(), torch.zeros_like(start)
    for g in gradients:
        m = 0.9 * m + g
        w = (1 - 0.1 * 0.2) * w - 0.1 * norm.steepest(g + 0.9 * m if nesterov else m)
    param = nn.Parameter(start.clone())
    options = {"momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.2}
    trained(mh.SteepestDescent([param], 0.1, norm, **options), param, gradients)
    torch.testing.assert_close(param.detach(), w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("psi", POTENTIALS, ids=repr)
def test_mirror_descent_is_its_formula(psi: mh.Potential) -> None:
    start, gradients = draw()
    u, m = psi.lift(start), torch.zeros_like(start)
    for g in gradients:
        m = 0.5 * m + g
        u = (1 - 0.1 * 0.2) * u - 0.1 * m
    param = nn.Parameter(start.clone())
    optimizer = mh.MirrorDescent([param], 0.1, psi, momentum=0.5, weight_decay=0.2)
    trained(optimizer, param, gradients)
    torch.testing.assert_close(param.detach(), psi.inverse(u), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("psi", POTENTIALS[:-1], ids=repr)
@pytest.mark.parametrize("cls", [mh.MirrorDescent, mh.MirrorAdam])
def test_any_potential_learns_and_resumes(cls: Any, psi: mh.Potential) -> None:
    """The loss falls; a checkpoint resumes to the bit; zero gradients change no bit."""
    start, _ = draw()
    target = 0.3 * draw(1)[1][0]
    params = [nn.Parameter(0.3 * start) for _ in range(2)]
    optimizers = [cls([param], 0.02, psi) for param in params]

    def steps(k: int, count: int) -> None:
        for _ in range(count):
            params[k].grad = params[k].detach() - target
            optimizers[k].step()

    steps(0, 30)
    file = io.BytesIO()
    torch.save(optimizers[0].state_dict(), file)
    file.seek(0)
    optimizers[1].load_state_dict(torch.load(file, weights_only=True))
    params[1].data.copy_(params[0].data)
    steps(0, 100)
    steps(1, 100)
    assert torch.equal(*params)
    apart = [float((w.detach() - target).square().sum()) for w in (params[0], 0.3 * start)]
    if not isinstance(psi, mh.KSupport):
        assert apart[0] < 0.7 * apart[1]
    before = params[0].detach().clone()
    params[0].grad = torch.zeros_like(before)
    if cls is mh.MirrorDescent:
        optimizers[0].step()
        assert torch.equal(params[0], before)


def test_sign_descent_normalized_sgd_and_coordinate_descent() -> None:
    start, gradients = draw()
    for p, direction in (
        (INF, torch.sign),
        (2, lambda g: g / g.norm()),
        (1, lambda g: g.sign() * (g.abs() == g.abs().max())),
    ):
        param, twin = (nn.Parameter(start.clone()) for _ in range(2))
        trained(mh.SteepestDescent([param], 0.1, p), param, gradients)
        trained(torch.optim.SGD([twin], 0.1), twin, [direction(g) for g in gradients])
        torch.testing.assert_close(param, twin)


@pytest.mark.parametrize("shape", [(16, 40), (40, 16), (24, 24)], ids=str)
@pytest.mark.parametrize("exact", [False, True])
def test_muon_is_steepest_descent_in_the_spectral_norm(shape: tuple[int, int], exact: bool) -> None:
    """Within the accuracy of its Newton-Schulz steps: singular values of .68 to 1.13, in bf16."""
    start, gradients = draw(4, shape)
    start, gradients = start.float(), [g.float() for g in gradients]
    ours, theirs = (nn.Parameter(start.clone()) for _ in range(2))
    norm = mh.Schatten(INF) if exact else mh.Schatten(INF, newton_schulz=5)
    muon = torch.optim.Muon([theirs], 0.02, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    mine = mh.SteepestDescent(
        [ours], 0.02, norm, momentum=0.9, nesterov=True, weight_decay=0.1,
        match_rms=0.2 * (0.9 if not exact else 1),
    )  # fmt: skip
    trained(mine, ours, gradients)
    trained(muon, theirs, gradients)
    moved = [(w.detach() - start).flatten() for w in (ours, theirs)]
    assert float(torch.cosine_similarity(*moved, dim=0)) > (0.98 if exact else 0.999)
    assert 0.8 < float(moved[0].norm() / moved[1].norm()) < 1.25


def test_muons_direction_moves_the_dual_of_any_potential() -> None:
    start, gradients = draw()
    u = start.clone()
    for g in gradients:
        u = u - 0.1 * mh.Schatten(INF).steepest(g)
    for geometry in (2, mh.KSupport(k=4)):
        param = nn.Parameter(start.clone())
        optimizer = mh.MirrorDescent([param], 0.1, geometry, direction=mh.Schatten(INF))
        trained(optimizer, param, gradients)
        expected = u if geometry == 2 else mh.KSupport(k=4).inverse(u)
        torch.testing.assert_close(param.detach(), expected)


def test_the_k_of_k_support_may_change_between_steps() -> None:
    """The dual is the dense state: an entry that was 0 comes back with what u has become."""
    start, gradients = draw(6)
    param = nn.Parameter(start.clone())
    optimizer = mh.MirrorDescent([param], 0.1, mh.KSupport(k=10))
    u = start.clone()
    for k, g in zip((10, 6, 2, 2, 5, 12), gradients, strict=True):
        optimizer.param_groups[0]["geometry"] = mh.KSupport(k=k)
        trained(optimizer, param, [g])
        u = u - 0.1 * g
        torch.testing.assert_close(param.detach(), mh.KSupport(k=k).inverse(u))
        assert int((param != 0).sum()) == k


def test_edits_from_outside_are_noticed() -> None:
    for psi in (mh.Schatten(1.3), mh.SoftThreshold(0.2), mh.KSupport(k=12)):
        start, gradients = draw(3)
        param = nn.Parameter(start.clone())
        optimizer = mh.MirrorDescent([param], 0.1, psi)
        trained(optimizer, param, gradients[:2])
        param.data[0] = 0.5
        edited = param.detach().clone()
        trained(optimizer, param, gradients[2:])
        expected = psi.inverse(psi.lift(edited) - 0.1 * gradients[2])
        torch.testing.assert_close(param.detach()[0], expected[0], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("cls", [mh.MirrorDescent, mh.MirrorAdam, mh.SteepestDescent])
def test_parameters_that_a_geometry_cannot_measure_are_named(cls: Any) -> None:
    model = nn.Linear(4, 3)
    before = [q.detach().clone() for q in model.parameters()]
    with pytest.raises(ValueError, match=r"'bias' must be a matrix for Schatten\(1\.5\).*PNorm"):
        cls(model.named_parameters(), 0.1, mh.Schatten(1.5))
    with pytest.raises(ValueError, match=r"'bias' has no dimension 1 for Grouped\(1\.5, dim=1\)"):
        cls(model.named_parameters(), 0.1, mh.Grouped(1.5, dim=1))
    with pytest.raises(TypeError, match="geometry must be"):
        cls(model.named_parameters(), 0.1, "l2")
    optimizer = cls(model.named_parameters(), 0.1, 1.5)
    optimizer.param_groups[0]["geometry"] = mh.Schatten(1.5)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match="'bias' must be a matrix"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_norms_are_refused_as_potentials_and_the_other_way_round() -> None:
    param = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"Schatten\(inf\) is only a norm.*steepest"):
        mh.MirrorDescent([param], 0.1, mh.Schatten(INF))
    with pytest.raises(TypeError, match=r"geometry must be a norm; the limit of Hyperbolic"):
        mh.SteepestDescent([param], 0.1, mh.HyperbolicEntropy(0.1))  # pyright: ignore
    with pytest.raises(ValueError, match="newton_schulz needs p = inf"):
        mh.Schatten(2, newton_schulz=5)


def test_a_checkpoint_of_another_geometry_is_refused() -> None:
    one, other = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    saved = mh.MirrorDescent([one], 0.1, mh.Schatten(1.5)).state_dict()
    assert saved["param_groups"][0]["geometry"] == "Schatten(1.5)"
    with pytest.raises(ValueError, match=r"geometry=Schatten\(1\.5\).*has geometry=1\.5"):
        mh.MirrorDescent([other], 0.1, 1.5).load_state_dict(saved)
    optimizer = mh.MirrorDescent([other], 0.1, mh.Schatten(1.5))
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["geometry"] == mh.Schatten(1.5)


def test_matrices_embeddings_and_the_rest_are_in_groups_of_their_own() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.TransformerEncoderLayer(4, 2, 8), nn.Linear(4, 9))
    model[2].weight = model[0].weight  # tied
    matrices, embeddings, rest = mh.matrix_param_groups(model, {"lr": 0.1}, rest={"lr": 0.2})
    assert [name for name, _ in embeddings[0]["params"]] == ["0.weight"]
    assert all(q.ndim == 2 for _, q in matrices[0]["params"])
    assert all(q.ndim == 1 for _, q in rest[0]["params"])
    assert sum(len(g[0]["params"]) for g in (matrices, embeddings, rest)) == len(
        list(model.parameters())
    )
    mh.SteepestDescent(matrices, 0.02, mh.Schatten(INF), momentum=0.95)
    mh.MirrorAdam(embeddings + rest, 1e-3)
    with pytest.raises(TypeError, match="matrices has 'learning_rate'"):
        mh.matrix_param_groups(model, {"learning_rate": 1})


@pytest.mark.slow
@pytest.mark.parametrize("psi", [mh.Schatten(1.2), mh.Grouped(1.2)], ids=repr)
def test_mirror_descent_tends_to_the_max_margin_direction_of_its_geometry(psi: Any) -> None:
    """On one-layer attention: share of the certified margin, on the tokens selected at the end."""
    problem = random_problem(20)
    weights = [nn.Parameter(torch.zeros(10, 10, dtype=torch.float64)) for _ in range(20)]
    optimizer = mh.MirrorDescent(weights, 1.0, psi)
    for k in range(2000):
        optimizer.param_groups[0]["lr"] = (1 + k / 50) ** -0.5
        W = torch.stack([w.detach() for w in weights])
        for w, g in zip(weights, problem.gradient(W).direction, strict=True):
            w.grad = g
        optimizer.step()
    W = torch.stack([w.detach() for w in weights])
    logits = problem.logits(W)
    tokens = logits.argmax(-1)[..., None]
    apart = (logits.gather(-1, tokens) - logits).scatter(-1, tokens, INF)
    best = mh.attention_svm(problem.X, problem.z, tokens[..., 0], psi, tol=1e-6)
    assert best.status == ["optimal"] * 20
    share = apart.amin((-2, -1)) / psi.norm(W, (-2, -1)) * psi.norm(best.W, (-2, -1))
    assert float(share.min()) > 0.99
