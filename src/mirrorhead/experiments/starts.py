"""One problem, several starts: the trials of a path may differ in W(0) alone."""

from __future__ import annotations

from mirrorhead.attention import AttentionProblem


def repeated(problem: AttentionProblem, times: int) -> AttentionProblem:
    """The problem so many times along a new leading dimension, to be descended at once.

    >>> from mirrorhead.data.synthetic import random_problem
    >>> repeated(random_problem(2), 3)
    AttentionProblem(trials=(3, 2), n=6, T=8, d=10, logistic)
    """
    parts = (problem.X, problem.z, problem.y, problem.v)
    X, z, y, v = (part.expand(times, *part.shape).contiguous() for part in parts)
    return AttentionProblem(X, z, y, v, problem.loss_name)
