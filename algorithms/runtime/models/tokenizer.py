"""The tokenizer of a model folder: text to ids, user turns through the chat template, ids to text, stop tokens.

The `tokenizers` library reads `tokenizer.json`, which holds the whole pipeline with its special tokens. So
transformers, which takes long to import, is imported only where a chat template is rendered. No torch is imported here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import tokenizers

from algorithms.runtime.models.folder import ModelError, read_optional_json, resolve_folder

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"


class Tokenizer:
    """Use `Tokenizer.load`. `eos_ids` are the tokens that end a generation."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        path: Path,
        eos_ids: frozenset[int],
        chat_template: str | None,
        special_tokens: dict[str, str],
        thinking: bool | None = None,
    ) -> None:
        self._backend = backend
        self._chat_template = chat_template
        self._special_tokens = special_tokens
        self._thinking = thinking
        self.path = path
        self.eos_ids = eos_ids

    @classmethod
    def load(cls, path: str | Path, thinking: bool | None = None) -> Tokenizer:
        """Read the tokenizer of a model folder or hub name; ModelError names a missing or malformed file.

        `thinking` switches a template that knows `enable_thinking`; None leaves it to the template.
        """
        folder = resolve_folder(path)
        backend = _read_backend(folder / TOKENIZER_FILE)
        config = read_optional_json(folder / TOKENIZER_CONFIG_FILE)
        special = _special_tokens(config)
        template = _chat_template(folder, config)
        return cls(backend, folder, _eos_ids(folder, backend, special), template, special, thinking)

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The tokenizer of the library."""
        return self._backend

    @property
    def size(self) -> int:
        """Tokens in the vocabulary, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over all (id, token) pairs: equal iff every id means the same token."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        pairs = sorted((index, token) for token, index in vocabulary.items())
        return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()

    @property
    def special_tokens(self) -> dict[str, str]:
        """Key of the tokenizer's config to token, such as `mask_token`."""
        return dict(self._special_tokens)

    def special_ids(self) -> dict[str, int]:
        """Every token that the vocabulary marks as special, with its id."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: index for index, token in added.items() if token.special}

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Ids of `text`, with the special tokens that the tokenizer adds, such as the leading BOS of Llama, unless
        `add_special` is False. Special tokens that the text spells out are read as such in any case."""
        return self._backend.encode(text, add_special_tokens=add_special).ids

    def encode_chat(self, turns: Sequence[str], replies: Sequence[str] = ()) -> list[int]:
        """Ids of a conversation of user `turns`, up to where the assistant writes the answer to the last one.

        `replies` are the answers to the turns before it. Raises ValueError for another number of replies or no turns,
        ModelError where the folder has no chat template or the template fails.
        """
        if not turns:
            raise ValueError("turns: expected at least one user turn, got none")
        if len(replies) != len(turns) - 1:
            raise ValueError(f"replies: expected one to each of {len(turns) - 1} earlier turns, got {len(replies)}")
        # The template writes the special tokens itself.
        return self.encode(self.render(turns, replies), add_special=False)

    @property
    def template(self) -> str | None:
        """What to call the chat template: the first digits of its SHA-256; None where there is none."""
        if self._chat_template is None:
            return None
        return f"chat template, sha256 {hashlib.sha256(self._chat_template.encode()).hexdigest()[:12]}"

    @property
    def can_think(self) -> bool:
        """Whether the chat template knows `enable_thinking`, the switch of models that reason before they answer."""
        return self._chat_template is not None and "enable_thinking" in self._chat_template

    def spell(self, token_id: int) -> str:
        """The text of one token of the vocabulary, special ones included."""
        return self._backend.decode([token_id], skip_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def render(self, turns: Sequence[str], replies: Sequence[str] = ()) -> str:
        """The chat template's text of what `encode_chat` encodes; raises as it does."""
        if self._chat_template is None:
            raise ModelError(
                "the model has no chat template",
                where=self.path,
                expected=f"{TEMPLATE_FILE}, or key 'chat_template' in {TOKENIZER_CONFIG_FILE}",
                fix="use raw prompts (data.raw=true, or data=code), or an instruction-tuned model",
            )
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        conversation = [{"role": "user", "content": turns[0]}]
        for reply, turn in zip(replies, turns[1:], strict=True):
            conversation += [{"role": "assistant", "content": reply}, {"role": "user", "content": turn}]
        variables: dict[str, Any] = {**self._special_tokens, "add_generation_prompt": True}
        if self._thinking is not None:
            variables["enable_thinking"] = self._thinking
        try:
            rendered = render_jinja_template([conversation], chat_template=self._chat_template, **variables)
        except (TemplateError, TypeError, ValueError) as error:
            raise ModelError(
                "the chat template does not accept these turns",
                where=self.path,
                actual=f"{len(turns)} user turns; {error}",
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
        raise ModelError(
            "the tokenizer file cannot be read",
            where=path,
            actual=str(error),
            fix="copy or download the file again",
        ) from error


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    named = {key: _content(value) for key, value in config.items() if key.endswith("_token")}
    return {key: token for key, token in named.items() if isinstance(token, str)}


def _eos_ids(folder: Path, backend: tokenizers.Tokenizer, special: dict[str, str]) -> frozenset[int]:
    """From generation_config.json as in transformers, else from config.json, else from the tokenizer."""
    for name in ("generation_config.json", "config.json"):
        declared = read_optional_json(folder / name).get("eos_token_id")
        if declared is not None:
            return frozenset([declared] if isinstance(declared, int) else declared)
    token = special.get("eos_token")
    index = None if token is None else backend.token_to_id(token)
    return frozenset() if index is None else frozenset([index])


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / TEMPLATE_FILE
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        return {entry.get("name"): entry.get("template") for entry in template}.get("default")
    return template
