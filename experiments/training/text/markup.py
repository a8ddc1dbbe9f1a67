"""What a target folder says about its own markup: the user turn of its chat template, its stop and mask tokens."""

from __future__ import annotations

from dataclasses import dataclass

from algorithms.runtime.models.folder import ModelError
from algorithms.runtime.models.tokenizer import Tokenizer

PROBE = "Where do the words of a user stand?"
REPLY = "The words of an answer stand here."


@dataclass(frozen=True)
class UserTurn:
    """Where a chat template puts a user turn."""

    prefix: str
    """What stands before the first user turn."""
    end: int
    """The special token that ends it."""
    after: str
    """What stands between that token and the answer."""


def user_turn(tokenizer: Tokenizer) -> UserTurn:
    """Where the user's words stand in the tokenizer's chat template.

    Raises ModelError where there is no template, or where its text does not show a turn that a special token ends: a
    model cannot be made to write such a turn and to stop behind it.
    """
    rendered = tokenizer.render([PROBE])
    prefix, found, suffix = rendered.partition(PROBE)
    following = tokenizer.encode(suffix, add_special=False)
    if not found or not following or following[0] not in tokenizer.special_ids().values():
        raise ModelError(
            "the chat template does not end a user turn with a special token",
            where=tokenizer.path,
            expected="prefix, the user's words, a special token",
            actual=repr(rendered),
            fix="give prompts from a file: text.kinds.NAME={source:file,path:prompts.jsonl}",
        )
    return UserTurn(prefix, following[0], suffix.removeprefix(tokenizer.spell(following[0])))


def next_turn(tokenizer: Tokenizer) -> str:
    """What stands between the token that ends an answer and the words of the next user turn.

    Raises ModelError where the chat template shows no such place.
    """
    rendered = tokenizer.render([PROBE, f"{PROBE} And then?"], [REPLY])
    between = rendered.partition(REPLY)[2].partition(PROBE)[0]
    ends = tokenizer.encode(between, add_special=False)[:1]
    if not ends or ends[0] not in stop_ids(tokenizer):
        raise ModelError(
            "the chat template does not end an answer with a token that the folder names as its end",
            where=tokenizer.path,
            expected="the answer, a token of eos_token_id, the next user turn",
            actual=repr(rendered),
            fix="give conversations of one turn: text.kinds.NAME.turns=1",
        )
    return between.removeprefix(tokenizer.spell(ends[0]))


def stop_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end an answer. Raises ModelError where the folder names none: every answer would be cut off."""
    if tokenizer.eos_ids:
        return tokenizer.eos_ids
    raise ModelError(
        "the folder names no token that ends an answer",
        where=tokenizer.path,
        expected="eos_token_id in generation_config.json or config.json, or eos_token in tokenizer_config.json",
        fix="copy generation_config.json and tokenizer_config.json of the model",
    )


def mask_token(tokenizer: Tokenizer, vocab_size: int) -> int:
    """Id of the token that stands for "to be drafted" in DFlash's blocks.

    That is the tokenizer's mask token; else the first row of the embedding behind the vocabulary, as in the drafters
    published for Qwen3; else the last special token that neither the chat template nor the tokenizer's config uses.
    Where there is none, it is `vocab_size`, the number of a row that the drafter owns.
    """
    special, named = tokenizer.special_ids(), tokenizer.special_tokens
    if (mask := special.get(named.get("mask_token", ""))) is not None:
        return mask
    if tokenizer.size < vocab_size:
        return tokenizer.size
    try:
        rendered = tokenizer.render([PROBE])
    except ModelError:
        rendered = ""
    unused = [
        index
        for token, index in special.items()
        if token not in named.values() and token not in rendered and index not in tokenizer.eos_ids
    ]
    return max(unused, default=vocab_size)
