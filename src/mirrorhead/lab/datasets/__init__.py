"""Real data sets: download, load, split, encode."""

from mirrorhead.lab.datasets.batches import Examples as Examples
from mirrorhead.lab.datasets.batches import epoch_batches as epoch_batches
from mirrorhead.lab.datasets.batches import even_batches as even_batches
from mirrorhead.lab.datasets.cad import Pairs as Pairs
from mirrorhead.lab.datasets.cad import edited as edited
from mirrorhead.lab.datasets.cad import load_cad as load_cad
from mirrorhead.lab.datasets.cifar10 import Pictures as Pictures
from mirrorhead.lab.datasets.cifar10 import load_cifar10 as load_cifar10
from mirrorhead.lab.datasets.encoded import Encoded as Encoded
from mirrorhead.lab.datasets.encoded import encode as encode
from mirrorhead.lab.datasets.eraser import Rationales as Rationales
from mirrorhead.lab.datasets.eraser import load_eraser as load_eraser
from mirrorhead.lab.datasets.fingerprint import fingerprint as fingerprint
from mirrorhead.lab.datasets.imdb import load_imdb as load_imdb
from mirrorhead.lab.datasets.protocol import Protocol as Protocol
from mirrorhead.lab.datasets.protocol import imdb_protocol as imdb_protocol
from mirrorhead.lab.datasets.sources import SOURCES as SOURCES
from mirrorhead.lab.datasets.sources import download as download
from mirrorhead.lab.datasets.splits import film_groups as film_groups
from mirrorhead.lab.datasets.splits import validation_split as validation_split
from mirrorhead.lab.datasets.splits import without as without
from mirrorhead.lab.datasets.texts import Texts as Texts
from mirrorhead.lab.datasets.tokenizer import load_tokenizer as load_tokenizer
from mirrorhead.lab.runtime.errors import DataError as DataError
