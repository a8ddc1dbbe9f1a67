"""Grammars of requests as masks over the vocabulary, by xgrammar (Dong et al., "XGrammar: Flexible and Efficient
Structured Generation Engine for Large Language Models", arXiv 2411.15100).

`Grammars` compiles for one vocabulary, and a `Matcher` is the position of one output in its grammar. Both run on the
host. xgrammar is imported where a vocabulary is prepared for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from algorithms.lazy import torch
from algorithms.step.sampling_params import GrammarParams

if TYPE_CHECKING:
    from algorithms.models.tokenizer import Tokenizer

Array = npt.NDArray[Any]
Encode = Callable[[str], Sequence[int]]
_NO_TEXT = b"\xff"  # a byte that UTF-8 does not have, so that no grammar allows it
_BYTES_PER_TOKEN = 16  # bytes of jump-forward text that are read per wanted token
_CACHE_BYTES = 1 << 30
INSTALL = "pip install -e '.[grammar]'"


class GrammarError(ValueError):
    """A grammar that cannot be compiled, or nothing to compile it with; the message names the setting."""


class Matcher:
    """The position of one output in its grammar. The prompt is no part of the output."""

    def __init__(self, compiled: Any, ends: frozenset[int], grammars: Grammars, draft_forced: bool = True) -> None:
        import xgrammar

        self._matcher: Any = xgrammar.GrammarMatcher(compiled)
        self._ends, self._grammars, self._draft_forced = ends, grammars, draft_forced
        self._lost = False
        self._forced = b""
        """Bytes that must follow; `_look_ahead` extends them, `follow` consumes them."""
        self._word_count = -(-compiled.tokenizer_info.vocab_size // 32)
        self.num_tokens = 0
        """Tokens of the output so far, those after its end included."""

    @property
    def ended(self) -> bool:
        """Whether a stop token has ended the output, which is in the grammar then."""
        return not self._lost and self._matcher.is_terminated()

    @property
    def complete(self) -> bool:
        """Whether the output so far is a whole text of the grammar."""
        return not self._lost and (self.ended or self._matcher.is_completed())

    def follow(self, tokens: Iterable[int]) -> None:
        """Append `tokens`; those after a stop token are ignored, and after one that is not allowed none is allowed."""
        for token in tokens:
            self.num_tokens += 1
            if not self._lost and not self.ended:
                self._lost = not self._matcher.accept_token(token)
                self._forced = self._forced[len(self._grammars.tokens[token]) :]

    def allowed(self) -> torch.Tensor:
        """[ceil(V / 32)] int32: the mask of the next token, as `specdec_kernels.mask_tokens` takes it."""
        bits = torch.full((1, self._word_count), -1, dtype=torch.int32)
        if self._lost:
            bits.zero_()
        elif not self.ended:
            self._matcher.fill_next_token_bitmask(bits)
        return bits[0]

    def forced(self, most: int) -> list[int]:
        """Jump-forward tokens, at most `most`: the text that the grammar forces, as the tokenizer encodes it, and
        then a stop token if only that may follow. Another split of the text into tokens may be allowed too. Empty if
        the request does not want such drafts.

        The cost is bounded by `most`: a grammar may force text of any length, even without end.
        """
        if not self._draft_forced or most < 1 or self._lost or self.ended:
            return []
        num_bytes = _BYTES_PER_TOKEN * (most + 1)
        end = self._look_ahead(num_bytes)
        tokens = [*self._grammars.encode(self._forced.decode(errors="ignore")), *end]
        if len(self._forced) == num_bytes:
            tokens = tokens[:-1]  # its last bytes may be missing
        tokens = tokens[:most]
        count = next((at for at, token in enumerate(tokens) if not self._matcher.accept_token(token)), len(tokens))
        self._matcher.rollback(count)
        return tokens[:count]

    def _look_ahead(self, num_bytes: int) -> list[int]:
        """Extend the forced bytes to at most `num_bytes`. Returns the stop token if only that may follow them."""
        steps = int(bool(self._forced) and self._matcher.accept_string(self._forced))
        end: list[int] = []
        while len(self._forced) < num_bytes:
            mask = self.allowed().numpy()
            byte = self._grammars.only_first_byte(mask)
            if not byte or not self._matcher.accept_string(byte):
                if np.count_nonzero(mask) == 1:
                    end = [t for t in self._ends if int(mask[t // 32]) & 0xFFFFFFFF == 1 << t % 32]
                break
            self._forced += byte
            steps += 1
        self._matcher.rollback(steps)
        return end

    def fill(self, first_child: Array, next_sibling: Array, tokens: Array, bits: Array) -> bool:
        """Write the mask of the token after each node of a draft tree, whose root is the last token of the output.

        `first_child`, `next_sibling`, `tokens` are [N] int64, `bits` [N, ceil(V / 32)] int32. Masks after a token that
        the grammar does not allow are undefined: no such token is accepted. Nodes after a stop token are unconstrained,
        because their tokens are discarded. Returns whether the output is constrained at all.
        """
        if self.ended:
            return False
        if self._lost:
            bits.fill(0)
            return True
        self._matcher.traverse_draft_tree(first_child, next_sibling, tokens, bits)
        after_end = [node for node, token in enumerate(tokens.tolist()) if node and token in self._ends]
        while after_end:
            node = after_end.pop()
            bits[node] = -1
            child = int(first_child[node])
            while child >= 0:
                after_end.append(child)
                child = int(next_sibling[child])
        return True


class Grammars:
    """Compiles grammars for one vocabulary, and keeps the latest of them, up to `_CACHE_BYTES`."""

    def __init__(self, tokens: Sequence[bytes], encode: Encode, add_prefix_space: bool = False) -> None:
        """`tokens` are the bytes that each token id writes, empty for ids that no grammar allows, such as special
        tokens. `encode` gives the tokens of a text, without special ones. Raises GrammarError without xgrammar."""
        # The library clears the bits of empty tokens one by one in every mask, and a padded vocabulary has many.
        self.tokens = [token or _NO_TEXT for token in tokens]
        self.encode, self._add_prefix_space = encode, add_prefix_space
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
        """A matcher at the start of an output in `params`' grammar, up to one of `ends`. GrammarError: malformed."""
        ends = frozenset(end for end in ends if end < len(self.tokens))
        if ends not in self._compilers:
            info = self._xgrammar.TokenizerInfo(
                self.tokens,
                self._xgrammar.VocabType.RAW,
                stop_token_ids=sorted(ends),
                add_prefix_space=self._add_prefix_space,
            )
            self._compilers[ends] = self._xgrammar.GrammarCompiler(info, cache_limit_bytes=_CACHE_BYTES)
        compiler = self._compilers[ends]
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
        return Matcher(compiled, ends, self, params.draft_forced)

    @cached_property
    def _other_bytes(self) -> dict[int, Array]:
        """By byte: the mask [ceil(V / 32)] int32 of the tokens that begin with another one."""
        first = np.zeros(-(-len(self.tokens) // 32) * 32, dtype=np.uint8)
        first[: len(self.tokens)] = [token[0] for token in self.tokens]
        return {int(byte): np.packbits(first != byte, bitorder="little").view(np.int32) for byte in np.unique(first)}

    def only_first_byte(self, mask: Array) -> bytes:
        """The byte that all tokens of `mask` [ceil(V / 32)] int32 begin with; empty if there is none."""
        words = mask.nonzero()[0]
        if not len(words):
            return b""
        word = int(mask[words[0]])
        byte = self.tokens[32 * int(words[0]) + (word & -word).bit_length() - 1][0]
        return b"" if (mask & self._other_bytes[byte]).any() else bytes([byte])

    def parses(self, params: GrammarParams, ends: frozenset[int], tokens: Sequence[int]) -> bool:
        """Whether `tokens` are complete in the grammar, with or without the stop token."""
        matcher = self.matcher(params, ends)
        matcher.follow(tokens)
        return matcher.complete


def _import_xgrammar() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise GrammarError(f"sampling.grammar: the package xgrammar is missing; install it: {INSTALL}") from error
    return xgrammar
