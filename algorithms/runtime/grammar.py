"""Grammars of requests as masks over the vocabulary, by xgrammar (Dong et al., "XGrammar: Flexible and Efficient
Structured Generation Engine for Large Language Models", arXiv 2411.15100).

`Grammars` compiles for one vocabulary, and a `Matcher` is where one text stands in its grammar. All of it runs on the
host. xgrammar is imported where a vocabulary is prepared for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from algorithms.runtime.sampling_params import GrammarParams

if TYPE_CHECKING:
    import torch

    from algorithms.runtime.models.tokenizer import Tokenizer

Array = npt.NDArray[Any]
Encode = Callable[[str], Sequence[int]]
_NO_TEXT = b"\xff"
"""A byte that UTF-8 does not have, so that no grammar allows it."""
INSTALL = "pip install -e '.[grammar]'"


class GrammarError(ValueError):
    """A grammar that cannot be compiled, or nothing to compile it with; the message names the setting."""


class Matcher:
    """Where one text stands in its grammar. The prompt is no part of the text."""

    def __init__(self, compiled: Any, ends: frozenset[int], encode: Encode, draft_forced: bool = True) -> None:
        import xgrammar

        self._matcher: Any = xgrammar.GrammarMatcher(compiled)
        self._ends, self._encode = ends, encode
        self._draft_forced = draft_forced
        self._lost = False
        self._word_count = -(-compiled.tokenizer_info.vocab_size // 32)
        self.num_tokens = 0
        """Tokens of the text so far, those behind its end included."""

    @property
    def ended(self) -> bool:
        """Whether a stop token has ended the text, which is in the grammar then."""
        return not self._lost and self._matcher.is_terminated()

    @property
    def complete(self) -> bool:
        """Whether the text so far is a whole text of the grammar."""
        return not self._lost and (self.ended or self._matcher.is_completed())

    def follow(self, tokens: Iterable[int]) -> None:
        """Append `tokens` to the text; nothing is asked of those behind a stop token. Behind a token that the grammar
        does not allow nothing is allowed any more."""
        for token in tokens:
            self.num_tokens += 1
            if not self._lost and not self.ended:
                self._lost = not self._matcher.accept_token(token)

    def allowed(self) -> torch.Tensor:
        """[ceil(V / 32)] int32: the mask of the next token, as `specdec_kernels.mask_tokens` takes it."""
        import torch

        bits = torch.full((1, self._word_count), -1, dtype=torch.int32)
        if self._lost:
            bits.zero_()
        elif not self.ended:
            self._matcher.fill_next_token_bitmask(bits)
        return bits[0]

    def forced(self, most: int) -> list[int]:
        """At most `most` tokens about which the grammar leaves no choice: its text as the tokenizer writes it, and a
        stop token that alone may follow. Another split of the text into tokens may be allowed too. None if the request
        wants no such drafts."""
        found: list[int] = []
        most = most if self._draft_forced else 0
        while len(found) < most and not self._lost and not self.ended:
            text = self._matcher.find_jump_forward_string()
            tokens = self._encode(text) if text else self._only_end()
            count = next((at for at, token in enumerate(tokens) if not self._matcher.accept_token(token)), len(tokens))
            found += tokens[:count]
            if count < len(tokens) or not tokens:
                break
        self._matcher.rollback(len(found))
        return found[:most]

    def fill(self, first_child: Array, next_sibling: Array, tokens: Array, bits: Array) -> bool:
        """Write the masks behind the nodes of a draft tree, whose root is the last token of the text.

        `first_child`, `next_sibling`, `tokens` are [N] int64, `bits` [N, ceil(V / 32)] int32. Rows behind a token that
        the grammar does not allow have no meaning: no such token is chosen. Behind a stop token all is allowed, because
        what stands there belongs to no text. Returns whether the text is constrained at all.
        """
        if self.ended:
            return False
        if self._lost:
            bits.fill(0)
            return True
        self._matcher.traverse_draft_tree(first_child, next_sibling, tokens, bits)
        behind = [node for node, token in enumerate(tokens.tolist()) if node and token in self._ends]
        while behind:
            node = behind.pop()
            bits[node] = -1
            child = int(first_child[node])
            while child >= 0:
                behind.append(child)
                child = int(next_sibling[child])
        return True

    def _only_end(self) -> list[int]:
        """The stop token that alone may follow, if it is so."""
        if not self._matcher.is_completed():
            return []
        words = self.allowed()
        return [end for end in self._ends if int(words.count_nonzero()) == 1 and int(words[end // 32]) == _bit(end)]


class Grammars:
    """Compiles grammars for one vocabulary. What has been compiled is kept."""

    def __init__(self, tokens: Sequence[bytes], encode: Encode, add_prefix_space: bool = False) -> None:
        """`tokens` are the bytes that each token id writes, empty for ids that no grammar allows, such as special
        tokens. `encode` gives the tokens of a text, without special ones. Raises GrammarError without xgrammar."""
        # The library clears the bits of empty tokens one by one in every mask, and a padded vocabulary has many.
        self._tokens = [token or _NO_TEXT for token in tokens]
        self._encode, self._add_prefix_space = encode, add_prefix_space
        self._xgrammar = _import_xgrammar()
        self._compilers: dict[frozenset[int], Any] = {}

    @classmethod
    def of_tokenizer(cls, tokenizer: Tokenizer, vocab_size: int) -> Grammars:
        """For a model with logits for `vocab_size` tokens. Raises GrammarError without xgrammar."""
        xgrammar = _import_xgrammar()
        from transformers import PreTrainedTokenizerFast

        whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend)
        # The stop tokens play no part here, but the library wants one.
        info = xgrammar.TokenizerInfo.from_huggingface(whole, vocab_size=vocab_size, stop_token_ids=[0])
        special = set(tokenizer.special_ids().values())
        tokens = [b"" if index in special else text for index, text in enumerate(info.decoded_vocab)]
        return cls(tokens, lambda text: tokenizer.encode(text, add_special=False), info.add_prefix_space)

    def matcher(self, params: GrammarParams, ends: frozenset[int]) -> Matcher:
        """At the beginning of a text in the grammar of `params`, which one of the tokens `ends` ends.

        Raises GrammarError where the grammar is malformed.
        """
        ends = frozenset(end for end in ends if end < len(self._tokens))
        compiler = self._compiler(ends)
        kinds = {
            "json_schema": lambda text: compiler.compile_json_schema(text, any_whitespace=params.any_whitespace),
            "regex": compiler.compile_regex,
            "ebnf": compiler.compile_grammar,
        }
        assert params.kind is not None
        try:
            compiled = kinds[params.kind](params.text)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0].rpartition("] ")[2]
            raise GrammarError(f"sampling.grammar.{params.kind}: it cannot be compiled: {reason}") from error
        return Matcher(compiled, ends, self._encode, params.draft_forced)

    def parses(self, params: GrammarParams, ends: frozenset[int], tokens: Sequence[int]) -> bool:
        """Whether `tokens` are a whole text of the grammar, with or without the stop token."""
        matcher = self.matcher(params, ends)
        matcher.follow(tokens)
        return matcher.complete

    def _compiler(self, ends: frozenset[int]) -> Any:
        if ends not in self._compilers:
            info = self._xgrammar.TokenizerInfo(
                self._tokens,
                self._xgrammar.VocabType.RAW,
                stop_token_ids=sorted(ends),
                add_prefix_space=self._add_prefix_space,
            )
            self._compilers[ends] = self._xgrammar.GrammarCompiler(info)
        return self._compilers[ends]


def _bit(token: int) -> int:
    """The word of a mask with the bit of `token` alone, as int32 has it."""
    return 1 << token % 32 if token % 32 < 31 else -(1 << 31)


def _import_xgrammar() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise GrammarError(f"sampling.grammar: the package xgrammar is missing; install it: {INSTALL}") from error
    return xgrammar
