"""What a trained model's weights and attention look like, beside what people point at."""

from mirrorhead.lab.evaluation.entropy import normalized_entropy as normalized_entropy
from mirrorhead.lab.evaluation.measures import Material as Material
from mirrorhead.lab.evaluation.measures import measure as measure
from mirrorhead.lab.evaluation.people import EditScores as EditScores
from mirrorhead.lab.evaluation.people import RationaleScores as RationaleScores
from mirrorhead.lab.evaluation.people import at_random as at_random
from mirrorhead.lab.evaluation.people import attention_rollout as attention_rollout
from mirrorhead.lab.evaluation.people import cls_attention as cls_attention
from mirrorhead.lab.evaluation.people import gradient_times_input as gradient_times_input
from mirrorhead.lab.evaluation.people import score_edits as score_edits
from mirrorhead.lab.evaluation.people import score_rationales as score_rationales
from mirrorhead.lab.evaluation.results import collect as collect
from mirrorhead.lab.evaluation.rollout import rollout as rollout
from mirrorhead.lab.evaluation.selection import average_precision as average_precision
from mirrorhead.lab.evaluation.selection import iou_f1 as iou_f1
from mirrorhead.lab.evaluation.selection import mass as mass
from mirrorhead.lab.evaluation.selection import token_f1 as token_f1
from mirrorhead.lab.evaluation.selection import top as top
from mirrorhead.lab.evaluation.selection import word_scores as word_scores
from mirrorhead.lab.evaluation.weights import attention_weights_by_kind as attention_weights_by_kind
from mirrorhead.lab.evaluation.weights import count_large as count_large
from mirrorhead.lab.evaluation.weights import gini as gini
from mirrorhead.lab.evaluation.weights import hoyer as hoyer
from mirrorhead.lab.evaluation.weights import pruned as pruned
