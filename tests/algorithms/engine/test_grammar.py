"""Where a text stands in its grammar: what is forced, what ends it, and the masks of a draft tree."""

from functools import cache

import numpy as np
import pytest

from algorithms.engine.grammar import Grammars, Matcher
from algorithms.step.sampling_params import GrammarParams

CHARACTERS = "abcdefghijklmnopqrstuvwxyz012345"  # 32 of them: the stop tokens fill the second word
END, OTHER_END = 63, 40


@cache
def grammars() -> Grammars:
    return Grammars([*(character.encode() for character in CHARACTERS), *[b""] * 32], ids)


def matcher(regex: str, ends: tuple[int, ...] = (END,), text: str = "", draft_forced: bool = True) -> Matcher:
    found = grammars().matcher(GrammarParams(regex=regex, draft_forced=draft_forced), frozenset(ends))
    found.follow(ids(text))
    return found


def ids(text: str) -> list[int]:
    return [CHARACTERS.index(character) for character in text]


@pytest.mark.parametrize(
    ("regex", "text", "most", "forced"),
    [
        ("abc", "", 9, [*ids("abc"), END]),
        ("abc", "", 4, [*ids("abc"), END]),
        ("abc", "", 3, ids("abc")),
        ("abc", "", 2, ids("ab")),
        ("abc", "", 0, []),
        ("abc", "a", 9, [*ids("bc"), END]),
        ("a[bc]d", "a", 9, []),
        ("a[bc]d", "ac", 9, [*ids("d"), END]),
        ("ab?", "a", 9, []),  # the end is one of two ways to go on
        ("ab", "b", 9, []),  # the text has left the grammar
    ],
)
def test_what_the_grammar_leaves_no_choice_about(regex: str, text: str, most: int, forced: list[int]) -> None:
    found = matcher(regex, text=text)
    assert found.forced(most) == forced == found.forced(most), "asking changes nothing"
    assert matcher(regex, text=text, draft_forced=False).forced(most) == []


@pytest.mark.parametrize("end", [0, 31, 32, END])
def test_a_stop_token_of_any_id_is_forced(end: int) -> None:
    """Bit 31 of a word is its sign."""
    found = grammars().matcher(GrammarParams(regex="hi"), frozenset({end}))
    assert found.forced(9) == [*ids("hi"), end]


def test_one_of_two_stop_tokens_is_not_forced() -> None:
    """Neither in one word of the mask nor in two."""
    assert matcher("a", (END, OTHER_END)).forced(9) == ids("a") == matcher("a", (END, 25)).forced(9)


def test_stop_tokens_outside_of_the_vocabulary_are_none() -> None:
    assert matcher("a", (END, 64, 1000)).forced(9) == [*ids("a"), END]


def test_behind_a_stop_token_of_a_draft_all_is_allowed() -> None:
    """Nodes: the root, b, the end, two children of the end, and the child of the second one."""
    found = matcher("ab?", text="a")
    first_child, next_sibling = np.array([1, -1, 3, -1, 5, -1]), np.array([-1, 2, -1, 4, -1, -1])
    bits = np.zeros((6, 2), np.int32)
    assert found.fill(first_child, next_sibling, np.array([0, 1, END, 7, 8, 9]), bits)
    assert bits[0].tolist() == [1 << 1, -(1 << 31)] and bits[1].tolist() == [0, -(1 << 31)]
    assert (bits[2:] == -1).all()


def test_a_text_that_has_ended_is_not_constrained_and_one_that_is_lost_ends_nothing() -> None:
    bits, none = np.zeros((1, 2), np.int32), np.array([-1])
    ended, lost = matcher("a", text="a"), matcher("a", text="b")
    assert (ended.ended, ended.complete) == (False, True)
    ended.follow([END, 5, 6])
    assert (ended.ended, ended.complete, ended.num_tokens) == (True, True, 4)
    assert not ended.fill(none, none, np.array([0]), bits) and (ended.allowed() == -1).all()
    assert (lost.ended, lost.complete) == (False, False) and lost.forced(3) == []
    assert lost.fill(none, none, np.array([0]), bits) and not bits.any() and not lost.allowed().any()


def test_a_whole_text_parses_with_and_without_its_end() -> None:
    params = GrammarParams(regex="ab?")
    for tokens, whole in (([0], True), ([0, 1], True), ([0, END], True), ([], False), ([1], False), ([0, 1, 1], False)):
        assert grammars().parses(params, frozenset({END}), tokens) == whole, tokens


@pytest.mark.parametrize(
    "kind, grammar",
    [("ebnf", 'root ::= "ab" root'), ("ebnf", 'root ::= "' + "ab" * 20_000 + '"')],
    ids=["endless", "long"],
)
def test_forced_text_of_any_length_is_read_as_far_as_it_is_wanted(kind: str, grammar: str) -> None:
    """The library's own search for forced text has no bound: without end it takes all memory."""
    found = grammars().matcher(GrammarParams(**{kind: grammar}), frozenset({END}))
    calls: list[str] = []
    encode = grammars().encode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammars(), "encode", lambda text: calls.append(text) or encode(text))
        for written in ("", "a", "ab", "aba"):
            found.follow(ids(written[-1:]))
            assert found.forced(5) == ids("babab" if len(written) % 2 else "ababa")
    assert max(map(len, calls)) < 200


def test_an_object_that_requires_itself_is_constrained_like_any_other() -> None:
    alphabet = [chr(code).encode() for code in range(32, 127)]
    grammars = Grammars([*alphabet, b""], lambda text: [ord(character) - 32 for character in text])
    schema = '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}'
    found = grammars.matcher(GrammarParams(json_schema=schema, any_whitespace=False), frozenset({95}))
    assert bytes(token + 32 for token in found.forced(12)) == b'{"a": {"a": '


def test_forced_text_ends_within_a_character() -> None:
    """Two characters that share their first byte: the byte is forced, the character is not."""
    tokens = [b"x", b"\xc3", b"\xa9", b"\xa8", b""]
    grammars = Grammars(tokens, lambda text: [tokens.index(bytes([byte])) for byte in text.encode()])
    found = grammars.matcher(GrammarParams(regex="x(é|è)"), frozenset({4}))
    assert found.forced(4) == [0]
    found.follow([0, 1, 2])
    assert found.forced(4) == [4]
