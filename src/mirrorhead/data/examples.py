"""The two worked examples of the paper's appendix H."""

from __future__ import annotations

import torch

from mirrorhead.attention import AttentionProblem


def example_2(halved: bool = False) -> AttentionProblem:
    """Example 2, (39): n = 2, T = 3, d = 2, z_i the first token; v starts at zero.

    The authors' code trains on half of the printed values: `halved` gives those.
    """
    X = torch.tensor(
        [
            [[-5.4, 2.4], [2.8, 4.2], [2.6, -0.2]],
            [[0.8, -4.4], [-2.2, -0.8], [1.8, 0.2]],
        ],
        dtype=torch.float64,
    )
    X = X / 2 if halved else X
    return AttentionProblem(X, X[:, 0], [1.0, -1.0], [0.0, 0.0])
