"""Real data sets: download, load, split, encode.

NAMES lists the data sets that can be trained on. Each is the object DATA_SET of the module of its
name, see `dataset`; `find` also takes a file of your own and a module of your own.
"""

from pathlib import Path

from mirrorhead_lab.datasets import kim as kim  # says where its files are published
from mirrorhead_lab.datasets.batches import Examples as Examples
from mirrorhead_lab.datasets.batches import epoch_batches as epoch_batches
from mirrorhead_lab.datasets.batches import even_batches as even_batches
from mirrorhead_lab.datasets.batches import fingerprint as fingerprint
from mirrorhead_lab.datasets.cad import Pairs as Pairs
from mirrorhead_lab.datasets.cad import edited as edited
from mirrorhead_lab.datasets.cad import load_cad as load_cad
from mirrorhead_lab.datasets.cifar10 import Pictures as Pictures
from mirrorhead_lab.datasets.cifar10 import load_cifar10 as load_cifar10
from mirrorhead_lab.datasets.dataset import DataSet as DataSet
from mirrorhead_lab.datasets.encoded import Encoded as Encoded
from mirrorhead_lab.datasets.encoded import encode as encode
from mirrorhead_lab.datasets.encoded import load_tokenizer as load_tokenizer
from mirrorhead_lab.datasets.eraser import Rationales as Rationales
from mirrorhead_lab.datasets.eraser import load_eraser as load_eraser
from mirrorhead_lab.datasets.imdb import film_groups as film_groups
from mirrorhead_lab.datasets.imdb import imdb_protocol as imdb_protocol
from mirrorhead_lab.datasets.imdb import load_imdb as load_imdb
from mirrorhead_lab.datasets.imdb import validation_split as validation_split
from mirrorhead_lab.datasets.own import SUFFIXES, own_file
from mirrorhead_lab.datasets.sources import SOURCES as SOURCES
from mirrorhead_lab.datasets.sources import Folder, locate
from mirrorhead_lab.datasets.sources import publish as publish
from mirrorhead_lab.datasets.texts import Splits as Splits
from mirrorhead_lab.datasets.texts import Texts as Texts
from mirrorhead_lab.datasets.texts import fingerprint_of as fingerprint_of
from mirrorhead_lab.datasets.texts import split_texts as split_texts
from mirrorhead_lab.datasets.texts import without as without
from mirrorhead_lab.runtime.errors import DataError as DataError
from mirrorhead_lab.runtime.extensions import load_object

NAMES = ("imdb", "imdb-published", "sst2", "trec", "subj", "cr", "cifar10")


def find(name: str) -> DataSet:
    """Return the data set of that name, of a .csv or .jsonl file, or of your own module.

    >>> find("trec").kind
    'text'
    """
    if Path(name).suffix in SUFFIXES:
        return own_file(Path(name))
    found = load_object(name, __name__, NAMES, "DATA_SET", DataSet)
    if found is None:
        known = f"{', '.join(NAMES)}, a .csv or .jsonl file, or a module of your own"
        raise DataError(f"the data set must be one of {known}; got {name!r}")
    return found


def download(name: str, folder: Folder = None) -> Path:
    """Download what was published under a name, such as "imdb" or "bert", unless it is there."""
    return locate(name, folder, download=True)
