"""The paper's models, a wrapper for Hugging Face models, and attention maps of all of them."""

from mirrorhead.lab.models.attention_maps import all_rows as all_rows
from mirrorhead.lab.models.attention_maps import attention_maps as attention_maps
from mirrorhead.lab.models.paper import TextClassifier as TextClassifier
from mirrorhead.lab.models.paper import TextSettings as TextSettings
from mirrorhead.lab.models.paper import ViT as ViT
from mirrorhead.lab.models.paper import ViTSettings as ViTSettings
from mirrorhead.lab.models.pretrained import HuggingFaceClassifier as HuggingFaceClassifier
from mirrorhead.lab.models.self_attention import SelfAttention as SelfAttention
