"""Where problems come from: random ones, the paper's examples, real data sets.

What is imported here is for real data; `synthetic` and `examples` have the rest.
"""

from mirrorhead.data.batches import Examples as Examples
from mirrorhead.data.batches import epoch_batches as epoch_batches
from mirrorhead.data.batches import even_batches as even_batches
from mirrorhead.data.cad import Pairs as Pairs
from mirrorhead.data.cad import edited as edited
from mirrorhead.data.cad import load_cad as load_cad
from mirrorhead.data.cifar10 import Pictures as Pictures
from mirrorhead.data.cifar10 import load_cifar10 as load_cifar10
from mirrorhead.data.encoded import Encoded as Encoded
from mirrorhead.data.encoded import encode as encode
from mirrorhead.data.eraser import Rationales as Rationales
from mirrorhead.data.eraser import load_eraser as load_eraser
from mirrorhead.data.errors import DataError as DataError
from mirrorhead.data.imdb import load_imdb as load_imdb
from mirrorhead.data.protocol import Protocol as Protocol
from mirrorhead.data.protocol import imdb_protocol as imdb_protocol
from mirrorhead.data.sources import SOURCES as SOURCES
from mirrorhead.data.sources import download as download
from mirrorhead.data.splits import film_groups as film_groups
from mirrorhead.data.splits import validation_split as validation_split
from mirrorhead.data.splits import without as without
from mirrorhead.data.texts import Texts as Texts
from mirrorhead.data.tokenizer import load_tokenizer as load_tokenizer
