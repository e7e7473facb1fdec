"""The paper's models, a wrapper for Hugging Face models, and attention maps of all of them."""

from mirrorhead_lab.models.attention_maps import all_rows as all_rows
from mirrorhead_lab.models.attention_maps import attention_maps as attention_maps
from mirrorhead_lab.models.paper import TextClassifier as TextClassifier
from mirrorhead_lab.models.paper import TextSettings as TextSettings
from mirrorhead_lab.models.paper import ViT as ViT
from mirrorhead_lab.models.paper import ViTSettings as ViTSettings
from mirrorhead_lab.models.pretrained import HuggingFaceClassifier as HuggingFaceClassifier
from mirrorhead_lab.models.self_attention import SelfAttention as SelfAttention
