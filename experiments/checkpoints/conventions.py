"""Finds the convention of a drafter whose folder leaves it open, by acceptance.

    python -m experiments.checkpoints.conventions TARGET DRAFTER [--algo dflash] [--text FILE] [--tokens 32]

A drafter that is read under a wrong convention is lossless, and hardly any of its drafts are accepted. So the target
decodes a few prompts greedily with the drafter under every reading: the position that a slot of a block predicts,
what a head feeds back, what an MTP head reads, and layer ids that are one lower or higher. The first reading is the
folder's own. Exit code 1: another reading is better by 5 %.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

DECLARED = "as declared"
LAYER_IDS = ("target_layer_ids", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
SAID_OTHERWISE = ("slots", "sample_from_anchor", "shift_label")  # keys that say what `slots` says
CLEARLY = 1.05  # a reading wins if its tokens per step are this much more than the declared one's
PROMPTS = ("def is_even(n):", "Tom has 3 apples and buys 4 more. How many apples are there now?", "1, 2, 3, 4, 5, 6,")


class Reading(NamedTuple):
    """One way to read a folder: keys of its config.json, a shift of its layer ids, settings of the algorithm."""

    name: str
    keys: dict[str, Any] = {}  # noqa: RUF012 - never changed
    shift: int = 0
    settings: dict[str, Any] = {}  # noqa: RUF012


def readings(algo: str) -> Iterator[Reading]:
    """Every reading of a folder for `algo`, the declared one first."""
    yield Reading(DECLARED)
    if algo == "mtp":
        for hidden_in, feedback in product(("raw", "normed"), repeat=2):
            settings = {"hidden_in": hidden_in, "feedback": feedback}
            yield Reading(f"hidden_in={hidden_in} feedback={feedback}", settings=settings)
        return
    key, values = ("slots", ("own", "next")) if algo == "dflash" else ("feedback", ("raw", "normed"))
    for value, shift in product(values, (0, -1, 1)):
        layers = f" layers{shift:+d}" if shift else ""
        yield Reading(f"{key}={value}{layers}", {key: value}, shift)


def rewritten(config: Mapping[str, Any], reading: Reading) -> dict[str, Any]:
    """`config` as the reading says. Raises ValueError for a shift where the folder names no layers."""
    replaced = {*reading.keys, *(SAID_OTHERWISE if "slots" in reading.keys else ())}

    def copied(values: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {k: copied(each) if isinstance(each, Mapping) else each for k, each in values.items()}
        found |= {key: [each + reading.shift for each in found[key]] for key in LAYER_IDS if key in found}
        return {key: each for key, each in found.items() if key not in replaced}

    if reading.shift and not any(f'"{key}"' in json.dumps(config) for key in LAYER_IDS):
        raise ValueError(f"config.json names no layers: expected one of {', '.join(LAYER_IDS)}")
    return {**copied(config), **reading.keys}


def variant(folder: Path, reading: Reading, place: Path) -> Path:
    """`folder` in `place` with the config of the reading, and links to its other files."""
    config = rewritten(json.loads((folder / "config.json").read_text(encoding="utf-8")), reading)
    place.mkdir()
    for file in folder.iterdir():
        if file.name != "config.json":
            (place / file.name).symlink_to(file.resolve())
    (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return place


def measured(target: Any, algo: str, folder: Path, texts: list[str], tokens: int) -> Iterator[tuple[Reading, float]]:
    """Tokens per step under each reading that loads; the reason of one that does not is printed."""
    from algorithms.frontend import generate, load_algorithm
    from algorithms.step.sampling_params import SamplingParams

    sampling = SamplingParams(max_new_tokens=tokens)
    with tempfile.TemporaryDirectory() as scratch:
        for number, reading in enumerate(readings(algo)):
            try:
                plain = reading.name == DECLARED or reading.settings
                place = folder if plain else variant(folder, reading, Path(scratch) / str(number))
                algorithm = load_algorithm(algo, target, place, **reading.settings)
            except ValueError as error:
                print(f"{reading.name:32} not read: {str(error).splitlines()[0]}")
                continue
            done = generate(target, texts, algorithm, sampling=sampling, max_batch=len(texts))
            counts = [count for completion in done.completions for count in completion.accepted_counts]
            yield reading, 1 + sum(counts) / len(counts)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("drafter")
    parser.add_argument("--algo", default="dflash", choices=("dflash", "eagle3", "peagle", "mtp"))
    parser.add_argument("--text", type=Path, help="a file with one prompt a line")
    parser.add_argument("--tokens", type=int, default=32)
    given = parser.parse_args(arguments)
    from algorithms.frontend import load_target
    from algorithms.models.folder import resolve_folder

    texts = given.text.read_text(encoding="utf-8").splitlines() if given.text else list(PROMPTS)
    folder, target = resolve_folder(given.drafter), load_target(given.target)
    found: dict[str, float] = {}
    for reading, tokens in measured(target, given.algo, folder, texts, given.tokens):
        found[reading.name] = tokens
        print(f"{reading.name:32} {tokens:5.2f} tokens per step", flush=True)
    best, declared = max(found, key=lambda name: found[name]), found.get(DECLARED, 0.0)
    right = found[best] <= CLEARLY * declared
    print(f"the folder's own reading {'is right' if right else f'is wrong or missing: {best}'}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
