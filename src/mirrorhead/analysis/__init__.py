"""What a trained model's weights and attention look like, beside what people point at."""

from mirrorhead.analysis.entropy import normalized_entropy as normalized_entropy
from mirrorhead.analysis.measures import Material as Material
from mirrorhead.analysis.measures import measure as measure
from mirrorhead.analysis.people import EditScores as EditScores
from mirrorhead.analysis.people import RationaleScores as RationaleScores
from mirrorhead.analysis.people import at_random as at_random
from mirrorhead.analysis.people import attention_rollout as attention_rollout
from mirrorhead.analysis.people import cls_attention as cls_attention
from mirrorhead.analysis.people import gradient_times_input as gradient_times_input
from mirrorhead.analysis.people import score_edits as score_edits
from mirrorhead.analysis.people import score_rationales as score_rationales
from mirrorhead.analysis.results import RecordError as RecordError
from mirrorhead.analysis.results import collect as collect
from mirrorhead.analysis.rollout import rollout as rollout
from mirrorhead.analysis.selection import average_precision as average_precision
from mirrorhead.analysis.selection import iou_f1 as iou_f1
from mirrorhead.analysis.selection import mass as mass
from mirrorhead.analysis.selection import token_f1 as token_f1
from mirrorhead.analysis.selection import top as top
from mirrorhead.analysis.selection import word_scores as word_scores
from mirrorhead.analysis.weights import attention_weights_by_kind as attention_weights_by_kind
from mirrorhead.analysis.weights import count_large as count_large
from mirrorhead.analysis.weights import gini as gini
from mirrorhead.analysis.weights import hoyer as hoyer
from mirrorhead.analysis.weights import pruned as pruned
