"""Example 1 of the paper: which problem has the solution that is printed there?

Two samples with z_i = x_i1, the first token selected. The matrices of the example are not
legible in every copy; they can be read with or without a token at the origin:

    with:     X_1 = (5, 0), (0, 0), (0, 1)     X_2 = -X_1
    without:  X_1 = (5, 0), (0, 1)             X_2 = -X_1

The paper prints W = (0.03846, 0; -0.00769, 0) for p = 3. Run this to see what certified
solutions say: python examples/example1.py
"""

from __future__ import annotations

import torch

import mirrorhead as mh

PRINTED = torch.tensor([[0.03846, 0.0], [-0.00769, 0.0]], dtype=torch.float64)
READINGS = {
    "with a token at the origin": [[5.0, 0.0], [0.0, 0.0], [0.0, 1.0]],
    "without it": [[5.0, 0.0], [0.0, 1.0]],
}
EXPONENTS = (1.5, 2.0, 3.0)


def solve(tokens: list[list[float]], p: float) -> mh.MarginSolution:
    first = torch.tensor(tokens, dtype=torch.float64)
    X = torch.stack([first, -first])  # (2, T, 2)
    solution = mh.attention_svm(X, X[:, 0], torch.zeros(2, dtype=torch.long), p, tol=1e-12)
    assert solution.check(X, X[:, 0], torch.zeros(2, dtype=torch.long))
    return solution


def main() -> None:
    print(f"printed in the paper, p = 3:             W11 {0.03846:.5f}   W21 {-0.00769:.5f}")
    for reading, tokens in READINGS.items():
        print(f"\n{reading}:")
        for p in EXPONENTS:
            solution = solve(tokens, p)
            W = solution.W
            same = bool((W - PRINTED).abs().max() < 1e-5)
            print(
                f"  p = {p:3g}: {solution.status}, gap {float(solution.gap):.0e},   "
                f"W11 {W[0, 0]:.5f}   W21 {W[1, 0]:.5f}{'   <- the printed one' if same else ''}"
            )
    print(
        "\nWith the token at the origin, 25 W11 >= 1 decides alone and the solution is the same"
        "\nfor every p. Without it, the printed matrix is the solution for p = 2, not for p = 3."
    )


if __name__ == "__main__":
    main()
