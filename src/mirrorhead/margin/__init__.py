"""Certified max-margin solvers: lp-AttSVM and lp-SVM."""

from mirrorhead.margin._problems import Check as Check
from mirrorhead.margin._problems import MarginSolution as MarginSolution
from mirrorhead.margin._problems import attention_svm as attention_svm
from mirrorhead.margin._problems import svm as svm
