"""CIFAR-10: what does an image show? Figure 11 of the paper's later version, on a small ViT."""

from __future__ import annotations

from mirrorhead_lab.evaluation.results import KINDS
from mirrorhead_lab.studies.claims import MARGIN, Claim, Comparison
from mirrorhead_lab.studies.classifiers import (
    ACCURACY,
    RULE,
    Classifier,
    classifier_study,
    prunes,
    rates,
    sparsity,
)

# Rates were moved up by a step each after validation had chosen the largest of the first grids.
METHODS = {
    "MD p=1.1": rates("mirror-descent", 0.03, 0.1, 0.3, 1.0, p=1.1),
    "MirrorAdam p=1.1": rates("mirror-adam", 1e-3, 3e-3, 0.01, 0.03, p=1.1, knee=1.0),
    "AdamW": rates("adamw", 1e-3, 3e-3, 0.01, 0.03, weight_decay=0.01),
}
CLAIMS = (
    Claim(
        "figure-11",
        "ViT: as accurate as Adam, and sparser",
        "On CIFAR-10 a vision transformer (ViT) trained by mirror descent with $p = 1.1$ is about"
        " as accurate as one trained with Adam, and its attention weights are sparser (Figure 11"
        " of the paper's later version).",
        (
            Comparison(ACCURACY, "MD p=1.1", "AdamW", margin=MARGIN),
            *(Comparison(sparsity("gini", kind), "MD p=1.1", "AdamW") for kind in KINDS),
            *(Comparison(sparsity("hoyer", k), "MD p=1.1", "AdamW", primary=False) for k in KINDS),
        ),
        differs=(
            "The paper trains a ViT of 512 dimensions with 6 layers for 1,000 epochs, on images"
            " that are cropped and flipped at random, to about 82 %, and compares it with Adam."
            " This one has 64 dimensions and 2 layers, was trained for 15 epochs with a cosine"
            " schedule on the images as they are, and is compared with AdamW."
        ),
    ),
    Claim(
        "cifar10-pruning",
        "Beyond the paper: a ViT that can be pruned",
        "On CIFAR-10, MirrorAdam with $p = 1.1$ is about as accurate as AdamW, and more accurate"
        " when the smallest 90 % of every weight matrix are set to 0, without retraining.",
        prunes("MirrorAdam p=1.1", "AdamW"),
    ),
)

STUDY = classifier_study(
    Classifier("laptop-vit", "cifar10"),
    METHODS,
    name="cifar10",
    title="CIFAR-10: what does an image show?",
    seeds=(0, 1, 2),
    seconds=360,
    about=(
        f"{len(METHODS)} optimizers train the same model (preset laptop-vit) for 15 epochs with"
        " batches of 50, on 45,000 images; 5,000 are the validation set, which chooses the epoch"
        " and the learning rate, and 10,000 are the test set."
    ),
    verdict_rule=RULE,
    claims=CLAIMS,
    docs=("evidence/cifar10", "verdicts"),
)
