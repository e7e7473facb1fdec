"""The lemmas of *Optimizing Attention with Mirror Descent*, each as the two sides of its claim.

Every function returns `Sides(left, right)`, and the lemma says that left >= right; those of Lemmas
1 and 15 are equal. So a lemma is checked by looking at `left - right`. Names are the paper's.
"""

from mirrorhead.theory.correlation import attention_sums as attention_sums
from mirrorhead.theory.correlation import gradient_bound as gradient_bound
from mirrorhead.theory.correlation import lemma_6 as lemma_6
from mirrorhead.theory.correlation import lemma_10 as lemma_10
from mirrorhead.theory.correlation import lemma_11 as lemma_11
from mirrorhead.theory.inequalities import Sides as Sides
from mirrorhead.theory.inequalities import lemma_2 as lemma_2
from mirrorhead.theory.inequalities import lemma_3 as lemma_3
from mirrorhead.theory.inequalities import lemma_4 as lemma_4
from mirrorhead.theory.inequalities import lemma_5 as lemma_5
from mirrorhead.theory.inequalities import lemma_15 as lemma_15
from mirrorhead.theory.joint import JointBounds as JointBounds
from mirrorhead.theory.joint import joint_bounds as joint_bounds
from mirrorhead.theory.steps import MirrorStep as MirrorStep
from mirrorhead.theory.steps import lemma_1 as lemma_1
from mirrorhead.theory.steps import lemma_12 as lemma_12
from mirrorhead.theory.steps import lemma_13 as lemma_13
from mirrorhead.theory.steps import lemma_14 as lemma_14
from mirrorhead.theory.steps import lemma_16 as lemma_16
from mirrorhead.theory.steps import lemma_17 as lemma_17
