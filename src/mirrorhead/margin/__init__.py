"""Certified max-margin solvers: lp-AttSVM and lp-SVM."""

from mirrorhead.margin.problems import attention_svm as attention_svm
from mirrorhead.margin.problems import svm as svm
from mirrorhead.margin.solution import Check as Check
from mirrorhead.margin.solution import MarginSolution as MarginSolution
