"""The paper's models, plain and fast, and a way to see what they look at."""

from mirrorhead.models.attention import SelfAttention as SelfAttention
from mirrorhead.models.huggingface import HuggingFaceClassifier as HuggingFaceClassifier
from mirrorhead.models.maps import all_rows as all_rows
from mirrorhead.models.maps import attention_maps as attention_maps
from mirrorhead.models.text import TextClassifier as TextClassifier
from mirrorhead.models.text import TextSettings as TextSettings
from mirrorhead.models.vit import ViT as ViT
from mirrorhead.models.vit import ViTSettings as ViTSettings
