"""Certified max-margin solvers, in any norm that has one: lp-AttSVM, lp-SVM and others."""

from mirrorhead.margin._problems import Check as Check
from mirrorhead.margin._problems import MarginSolution as MarginSolution
from mirrorhead.margin._problems import attention_svm as attention_svm
from mirrorhead.margin._problems import multiclass_svm as multiclass_svm
from mirrorhead.margin._problems import svm as svm
