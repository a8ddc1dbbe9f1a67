"""Model folders on disk: finding them, reading their JSON files, and their error. No torch is imported here."""

import json
import re
from pathlib import Path
from typing import Any

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
DOWNLOADED = ["*.safetensors", "*.json", "*.jinja"]
PICKLED_WEIGHTS = "pytorch_model.bin"
COPY_AGAIN = "copy or download the file again"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class ModelError(ValueError):
    """A model folder that cannot be used: what is wrong, where, what was expected and found, and the fix."""

    def __init__(
        self, what: str, *, where: str | Path, fix: str, expected: object = None, actual: object = None
    ) -> None:
        details = {"where": where, "expected": expected, "actual": actual, "fix": fix}
        shown = [f"  {name + ':':<9} {value}" for name, value in details.items() if value is not None]
        super().__init__("\n".join([what, *shown]))


def is_absent(path_or_hub_name: str | Path) -> bool:
    """Whether there is no such file or folder, and no hub name of this form, whose first part is no local folder."""
    name = str(path_or_hub_name)
    if Path(name).expanduser().exists():
        return False
    return not HUB_NAME.fullmatch(name) or Path(name.split("/")[0]).is_dir()


def resolve_folder(path_or_hub_name: str | Path, pickles: bool = False) -> Path:
    """The folder of a model: an existing one, or a hub name `organisation/name`, downloaded once and cached. Only
    safetensors, JSON and Jinja files are downloaded, and `pytorch_model.bin` with `pickles`. Raises ModelError."""
    name = str(path_or_hub_name)
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise ModelError(
            "a model path must be a folder",
            where=path,
            expected="a folder with config.json and safetensors weights",
            actual="a file" + (" (pickle, never loaded)" if path.suffix in PICKLE_SUFFIXES else ""),
            fix="give the folder that holds the model's files",
        )
    if is_absent(name):
        raise ModelError(
            "model folder not found",
            where=path.absolute(),
            expected="an existing folder, or a hub name like organisation/name",
            fix="check the spelling of model.path or model.draft_path",
        )
    return _download(name, [*DOWNLOADED, PICKLED_WEIGHTS] if pickles else DOWNLOADED)


def _download(name: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the hub client raises OSError, ValueError and its HTTP library's own families
        reason = str(error).strip().splitlines()
        raise ModelError(
            "model not found: there is no such folder, and the hub did not deliver it",
            where=name,
            actual=f"{type(error).__name__}: {reason[0] if reason else 'no message'}",
            fix="check the name and the network, or download the model and give its folder",
        ) from error


def read_json(path: Path, fix: str) -> dict[str, Any]:
    """The mapping in a JSON file; ModelError where the file is absent (with `fix`), malformed, or no mapping."""
    if not path.is_file():
        raise ModelError(f"{path.name} is missing", where=path.parent, fix=fix)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path.name} is not valid JSON", where=path, actual=str(error), fix=COPY_AGAIN) from error
    if not isinstance(content, dict):
        raise ModelError(f"{path.name} holds no mapping", where=path, actual=type(content).__name__, fix=COPY_AGAIN)
    return content


def read_optional_json(path: Path) -> dict[str, Any]:
    return read_json(path, fix="") if path.is_file() else {}
