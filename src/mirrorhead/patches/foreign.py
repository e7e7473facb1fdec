"""What a path holds that is no safetensors checkpoint, in words, and what to do about it."""

from __future__ import annotations

import zipfile
from pathlib import Path

#: First bytes of formats that people have at hand.
_FORMATS = {
    b"GGUF": "a GGUF file",
    b"\x89HDF": "an HDF5 file",
    b"PK\x03\x04": "a zip archive",
    b"\x1f\x8b": "a gzip archive",
    b"<": "a web page or XML",
    b"{": "JSON",
}
_PYTORCH = {".bin", ".pt", ".pth", ".ckpt"}
_ONLY = "only safetensors files and Hugging Face folders that hold them are read"


def about_file(path: Path) -> str:
    """Say what is wrong with a file that cannot be read as safetensors; "" if nothing is known."""
    if path.is_dir():
        return f"{path} is a folder; give the path of a file"
    if not path.exists():
        return f"{path} does not exist"
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError:  # the caller knows the error
        return ""
    if not start:
        return f"{path} is empty"
    if start.startswith(b"version https://git-lfs"):
        return f"{path} is a Git LFS pointer, not the file itself: fetch it with git lfs pull"
    if _is_pytorch(path, start):
        return f"{path} is a PyTorch file; {_ONLY}. Convert it in Python: {conversion(path)}"
    known = (what for magic, what in _FORMATS.items() if start.lstrip().startswith(magic))
    what = next(known, "")
    return what and f"{path} is {what}; {_ONLY}"


def about_folder(path: Path, wanted: str) -> str:
    """Say why a folder without the files that are `wanted` cannot be read."""
    problem = f"{path} has neither {wanted}"
    if (path / "adapter_config.json").is_file():
        return f"{problem}: it is an adapter; merge it into its base first (merge_and_unload())"
    found = sorted(file for file in path.iterdir() if file.suffix in _PYTORCH)
    models = [file for file in found if file.stem in ("pytorch_model", "model")] or found
    if len(models) == 1:
        place = path / "model.safetensors"
        return f"{problem}; {_ONLY}. Convert it in Python: {conversion(models[0], place)}"
    others = sorted(file.name for file in path.glob("*.safetensors"))[:3]
    if others:
        return f"{problem}, but {', '.join(others)}; give the path of the file"
    return f"{problem}; {_ONLY}"


def conversion(path: Path, out: Path | None = None) -> str:
    """Python code that writes a PyTorch file as a safetensors file."""
    target = path.with_suffix(".safetensors") if out is None else out
    return (
        "import torch, safetensors.torch;"
        f" state = torch.load({str(path)!r}, map_location='cpu', weights_only=True);"
        " state = {name: t.contiguous().clone() for name, t in state.items()};"
        f" safetensors.torch.save_file(state, {str(target)!r})"
    )


def _is_pytorch(path: Path, start: bytes) -> bool:
    if start.startswith(b"\x80") and start[1] <= 5:  # a pickle, as older versions wrote
        return True
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return False
