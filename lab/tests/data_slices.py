"""Small data sets in the published layouts, for machines that have none, and a file server."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from mirrorhead_lab.datasets.sources import Remote

WORDS = [
    "the",
    "a",
    "film",
    "plot",
    "was",
    "is",
    "dull",
    "grand",
    "awful",
    "superb",
    "actor",
    "scene",
    "and",
    "of",
    "not",
    "very",
]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, "##s", ".", "!"]

needs_real_data = pytest.mark.skipif(
    "MIRRORHEAD_DATA" not in os.environ, reason="MIRRORHEAD_DATA is not set"
)


def sentence(rng: np.random.Generator, label: int, words: int = 12) -> str:
    """Words at random, and one that tells the label."""
    chosen = list(rng.choice([w for w in WORDS if w not in ("dull", "grand")], words))
    chosen[int(rng.integers(words))] = ("dull", "grand")[label]
    return " ".join(chosen) + "."


def make_imdb(root: Path, per_folder: int = 6, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    for split in ("train", "test"):
        for label, name, rating in ((0, "neg", 2), (1, "pos", 9)):
            folder = root / "aclImdb" / split / name
            folder.mkdir(parents=True)
            for i in range(per_folder):
                text = sentence(rng, label, int(rng.integers(4, 20)))
                (folder / f"{i}_{rating}.txt").write_text(text)
    return root / "aclImdb"


def make_cad(root: Path, pairs: list[tuple[str, str]]) -> Path:
    folder = root / "cad-imdb"
    folder.mkdir(parents=True)
    rows = [
        f"{label}\t{text}\t{number}"
        for number, pair in enumerate(pairs)
        for label, text in zip(("Negative", "Positive"), pair, strict=True)
    ]
    for split in ("train", "dev", "test"):
        content = "\n".join(["Sentiment\tText\tbatch_id", *rows]) + "\n"
        (folder / f"{split}_paired.tsv").write_text(content)
    return folder


def make_eraser(root: Path) -> Path:
    folder = root / "movies"
    (folder / "docs").mkdir(parents=True)
    for split in ("train", "val", "test"):
        name = f"negR_{split}.txt"
        (folder / "docs" / name).write_text("a dull film .\nthe plot was awful .\n")
        span = {"docid": name, "start_token": 1, "end_token": 3, "text": "dull film"}
        empty = {"docid": name, "start_token": 5, "end_token": 5, "text": ""}
        note = {"annotation_id": name, "classification": "NEG", "evidences": [[span], [empty]]}
        (folder / f"{split}.jsonl").write_text(json.dumps(note) + "\n")
    return folder


def make_cifar10(root: Path, per_file: int = 3) -> Path:
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        records = rng.integers(0, 256, (per_file, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (folder / name).write_bytes(records.tobytes())
    return folder


def make_bert(root: Path) -> Path:
    folder = root / "bert-uncased"
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    return folder


def tar_of(files: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    """A .tar.gz with these members, whatever their names are."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
    return buffer.getvalue()


class FileServer:
    """Serves one content over HTTP, with the bad manners a test asks for."""

    def __init__(self, content: bytes, name: str = "set.tar.gz") -> None:
        self.content = content
        self.name = name
        self.ranges = True  # whether it can send a part
        self.cuts: list[int] = []  # bytes after which the next answers break off
        self.status = 200
        self.asked: list[str | None] = []  # the Range of every request
        self.url = ""

    @property
    def remote(self) -> Remote:
        return Remote(self.url, len(self.content), hashlib.sha256(self.content).hexdigest())

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        asked = handler.headers.get("Range")
        self.asked.append(asked)
        if self.status != 200:
            handler.send_error(self.status)
            return
        begin = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.ranges else 0
        body = self.content[begin:]
        handler.send_response(206 if begin else 200)
        if begin:
            last = len(self.content) - 1
            handler.send_header("Content-Range", f"bytes {begin}-{last}/{len(self.content)}")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body[: self.cuts.pop(0)] if self.cuts else body)
        handler.wfile.flush()


@contextmanager
def serving(server: FileServer) -> Iterator[FileServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.answer(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{httpd.server_address[1]}/{server.name}"
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()
