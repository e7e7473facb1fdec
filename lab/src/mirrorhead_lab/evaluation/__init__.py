"""Evaluation of trained models: sparsity, attention, rationales, and the schema of results."""

from mirrorhead_lab.evaluation.attention_reading import AttentionReading as AttentionReading
from mirrorhead_lab.evaluation.attention_reading import normalized_entropy as normalized_entropy
from mirrorhead_lab.evaluation.attention_reading import read_attention as read_attention
from mirrorhead_lab.evaluation.attention_reading import rollout as rollout
from mirrorhead_lab.evaluation.measures import EvaluationData as EvaluationData
from mirrorhead_lab.evaluation.measures import measure as measure
from mirrorhead_lab.evaluation.rationales import at_random as at_random
from mirrorhead_lab.evaluation.rationales import attention_rollout as attention_rollout
from mirrorhead_lab.evaluation.rationales import average_precision as average_precision
from mirrorhead_lab.evaluation.rationales import cls_attention as cls_attention
from mirrorhead_lab.evaluation.rationales import gradient_times_input as gradient_times_input
from mirrorhead_lab.evaluation.rationales import iou_f1 as iou_f1
from mirrorhead_lab.evaluation.rationales import mass as mass
from mirrorhead_lab.evaluation.rationales import score_edits as score_edits
from mirrorhead_lab.evaluation.rationales import score_rationales as score_rationales
from mirrorhead_lab.evaluation.rationales import token_f1 as token_f1
from mirrorhead_lab.evaluation.rationales import top as top
from mirrorhead_lab.evaluation.rationales import word_scores as word_scores
from mirrorhead_lab.evaluation.results import EditScores as EditScores
from mirrorhead_lab.evaluation.results import RationaleScores as RationaleScores
from mirrorhead_lab.evaluation.sparsity import (
    attention_weights_by_kind as attention_weights_by_kind,
)
from mirrorhead_lab.evaluation.sparsity import count_large as count_large
from mirrorhead_lab.evaluation.sparsity import gini as gini
from mirrorhead_lab.evaluation.sparsity import hoyer as hoyer
from mirrorhead_lab.evaluation.sparsity import pruned as pruned
