"""A draft model with another tokenizer than the target's, in the target's token ids.

It drafts only tokens that both vocabularies have (token-level intersection, TLI, arXiv 2502.05202). Two tokens are the
same if they stand for the same bytes, or are special tokens of the same text; the tokens that end a text count as one.
In the place of a target token that the draft model does not have, it reads the last of its own tokens for that text,
so positions stay aligned.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from algorithms.models.folder import ModelError
from algorithms.models.loading.target import Target
from algorithms.models.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class SharedVocabulary:
    """The tokens that a target and a draft model have in common."""

    target_ids: Tensor  # [S] int64, rising
    draft_ids: Tensor  # [S] int64: the draft model's id of each
    substitutes: Tensor  # [V] int64: the draft model's token that it reads in the place of each target token

    @classmethod
    def of(cls, target: Tokenizer, draft: Tokenizer, num_target_ids: int, num_draft_ids: int) -> SharedVocabulary:
        """The tokens in common with ids below these sizes; ModelError where there are none."""
        theirs = {content: index for index, content in reversed(_contents(draft, num_draft_ids).items())}
        ends = sorted(each for each in draft.eos_ids if each < num_draft_ids)
        exact, substitutes = {}, torch.zeros(num_target_ids, dtype=torch.int64)
        for index, content in _contents(target, num_target_ids).items():
            if index in target.eos_ids and ends:
                exact[index] = ends[0]
            elif content in theirs:
                exact[index] = theirs[content]
            text = content if isinstance(content, str) else content.decode("utf-8", errors="replace")
            pieces = [exact[index]] if index in exact else draft.encode(text, add_special=False)
            substitutes[index] = pieces[-1] if pieces else 0
        if not exact:
            raise ModelError(
                "draft and target have no token in common",
                where=draft.path,
                expected=f"a tokenizer that shares tokens with that of {target.path}",
                fix="use another draft model",
            )
        shared = sorted(exact)
        return cls(torch.tensor(shared), torch.tensor([exact[index] for index in shared]), substitutes)

    @property
    def offsets(self) -> Tensor:
        """[S] int64: target id less row of the LM head, for each row."""
        return self.target_ids - torch.arange(len(self.target_ids))

    def apply(self, draft: Target) -> Target:
        """`draft`, whose model is changed: an embedding for the target's ids, an LM head over `target_ids`."""
        model = draft.model
        table = model.model.embed_tokens.weight.data
        rows = table if model.lm_head is None else model.lm_head.weight.data
        head = nn.Linear(rows.shape[1], len(self.draft_ids), bias=False, device="meta")
        head.weight = nn.Parameter(rows[self.draft_ids.to(rows.device)], requires_grad=False)
        model.lm_head = head
        model.model.embed_tokens = nn.Embedding.from_pretrained(table[self.substitutes.to(table.device)])
        config = replace(draft.config, vocab_size=len(self.substitutes), tie_word_embeddings=False)
        return replace(draft, config=config)


def _contents(tokenizer: Tokenizer, size: int) -> dict[int, bytes | str]:
    """Id below `size` to the bytes that a token stands for, or the text of a special token; rising."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # slow to import

    bytes_of = {character: byte for byte, character in bytes_to_unicode().items()}
    special = {index: text for text, index in tokenizer.special_ids().items()}
    added = tokenizer.backend.get_added_tokens_decoder()
    byte_level = "ByteLevel" in json.dumps(json.loads(tokenizer.backend.to_str())["decoder"])
    found: dict[int, bytes | str] = {}
    for token, index in sorted(tokenizer.backend.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1]):
        if index >= size:
            continue
        if index in special:
            found[index] = special[index]
        elif index in added:
            found[index] = token.encode()
        elif byte_level and all(character in bytes_of for character in token):
            found[index] = bytes(bytes_of[character] for character in token)
        elif match := _BYTE_TOKEN.fullmatch(token):
            found[index] = bytes([int(match[1], 16)])
        else:
            found[index] = token.replace("▁", " ").encode()
    return found
