"""The tokenizer of a model folder: text to ids, user turns through the chat template, ids to text, stop tokens.

The `tokenizers` library reads `tokenizer.json`. Transformers, which takes long to import, is imported only where a
chat template is rendered. No torch is imported here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import tokenizers

from algorithms.models.config_keys import read_eos
from algorithms.models.folder import COPY_AGAIN, ModelError, read_optional_json, resolve_folder

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Use `Tokenizer.load`. `eos_ids` are the tokens that end a generation."""

    backend: tokenizers.Tokenizer
    path: Path
    eos_ids: frozenset[int]
    chat_template: str | None
    special_tokens: dict[str, str]  # key of the tokenizer's config to token, such as `mask_token`
    thinking: bool | None = None

    @classmethod
    def load(cls, path: str | Path, thinking: bool | None = None) -> Tokenizer:
        """Read the tokenizer of a folder or hub name; ModelError names a missing or malformed file. `thinking`
        switches a template that knows `enable_thinking`; None leaves it to the template."""
        folder = resolve_folder(path)
        backend = _read_backend(folder / TOKENIZER_FILE)
        config = read_optional_json(folder / TOKENIZER_CONFIG_FILE)
        special = {key: value for key, value in config.items() if key.endswith("_token")}
        special |= {key: value.get("content") for key, value in special.items() if isinstance(value, dict)}
        special = {key: token for key, token in special.items() if isinstance(token, str)}
        template = _chat_template(folder, config)
        return cls(backend, folder, _eos_ids(folder, backend, special), template, special, thinking)

    @property
    def size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over all (id, token) pairs: equal iff every id means the same token."""
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        pairs = sorted((index, token) for token, index in vocabulary.items())
        return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()

    def special_ids(self) -> dict[str, int]:
        """Every token that the vocabulary marks as special, with its id."""
        added = self.backend.get_added_tokens_decoder()
        return {token.content: index for index, token in added.items() if token.special}

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Ids of `text`, with the special tokens that the tokenizer adds, such as BOS, unless `add_special`."""
        try:
            return self.backend.encode(text, add_special_tokens=add_special).ids
        except (TypeError, UnicodeError) as error:  # the library says nothing of the character
            raise ModelError(
                "the text cannot be encoded",
                where=self.path,
                expected="text in Unicode",
                actual="a lone surrogate" if any(0xD800 <= ord(each) < 0xE000 for each in text) else str(error),
                fix="remove the character from the prompt",
            ) from error

    def encode_chat(self, turns: Sequence[str], replies: Sequence[str] = ()) -> list[int]:
        """Ids of a conversation of user `turns`, up to the answer to the last one; `replies` answer the others.
        ValueError for another number of replies or no turns, ModelError where the chat template is absent or fails."""
        if not turns:
            raise ValueError("turns: expected at least one user turn, got none")
        if len(replies) != len(turns) - 1:
            raise ValueError(f"replies: expected one to each of {len(turns) - 1} earlier turns, got {len(replies)}")
        # The template writes the special tokens itself.
        return self.encode(self.render(turns, replies), add_special=False)

    @property
    def template(self) -> str | None:
        """Name of the chat template: the first digits of its SHA-256; None where there is none."""
        if self.chat_template is None:
            return None
        return f"chat template, sha256 {hashlib.sha256(self.chat_template.encode()).hexdigest()[:12]}"

    @property
    def can_think(self) -> bool:
        return self.chat_template is not None and "enable_thinking" in self.chat_template

    def spell(self, token_id: int) -> str:
        return self.backend.decode([token_id], skip_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def render(self, turns: Sequence[str], replies: Sequence[str] = ()) -> str:
        """The conversation that `encode_chat` encodes; raises as it does."""
        if self.chat_template is None:
            raise ModelError(
                "the model has no chat template",
                where=self.path,
                expected=f"{TEMPLATE_FILE}, or key 'chat_template' in {TOKENIZER_CONFIG_FILE}",
                fix="use raw prompts (data.raw=true, or data=code), or an instruction-tuned model",
            )
        from transformers.utils.chat_template_utils import render_jinja_template

        conversation = [{"role": "user", "content": turns[0]}]
        for reply, turn in zip(replies, turns[1:], strict=True):
            conversation += [{"role": "assistant", "content": reply}, {"role": "user", "content": turn}]
        variables: dict[str, Any] = {**self.special_tokens, "add_generation_prompt": True}
        if self.thinking is not None:
            variables["enable_thinking"] = self.thinking
        try:
            rendered = render_jinja_template([conversation], chat_template=self.chat_template, **variables)
        except Exception as error:  # a template is a program of somebody else: it may fail in any way
            raise ModelError(
                "the chat template does not accept these turns",
                where=self.path,
                actual=f"{len(turns)} user turns; {str(error) or type(error).__name__}",
                fix="give one turn per prompt, or use raw prompts (data.raw=true)",
            ) from error
        texts, _generation_spans = cast(tuple[list[str], Any], rendered)
        return texts[0]


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ModelError(
            f"{TOKENIZER_FILE} is missing",
            where=path.parent,
            fix="save the fast tokenizer there: AutoTokenizer.from_pretrained(model).save_pretrained(folder)",
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every malformed file
        raise ModelError("the tokenizer file cannot be read", where=path, actual=str(error), fix=COPY_AGAIN) from error


def _eos_ids(folder: Path, backend: tokenizers.Tokenizer, special: dict[str, str]) -> frozenset[int]:
    """From generation_config.json as in transformers, else from config.json, else from the tokenizer."""
    for name in ("generation_config.json", "config.json"):
        try:
            declared = read_eos(read_optional_json(folder / name))
        except ValueError as error:
            place = folder / name
            raise ModelError("the stop tokens cannot be used", where=place, actual=error, fix=COPY_AGAIN) from error
        if declared:
            return frozenset(declared)
    token = special.get("eos_token")
    index = None if token is None else backend.token_to_id(token)
    return frozenset() if index is None else frozenset([index])


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / TEMPLATE_FILE
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template is None or isinstance(template, str):
        return template
    raise ModelError(
        "the chat template cannot be used",
        where=folder / TOKENIZER_CONFIG_FILE,
        expected="text, or a list of named texts",
        actual=type(template).__name__,
        fix=COPY_AGAIN,
    )
