"""The tokenizer of a folder, against transformers' AutoTokenizer and on folders that lack what is asked for."""

from pathlib import Path

import pytest

from algorithms.models.folder import ModelError
from algorithms.models.tokenizer import Tokenizer
from tests.algorithms.tiny_folders import END_ID, SPECIAL_TOKENS, edit_json, write_json, write_tokenizer

TEXTS = ("", "a", "two words", "def f(x):\n    return x\n", "naïve 🙂 日本", "a <|user|> b<|end|>", "  spaced\t")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


def test_agrees_with_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    for said in (["one"], ["one", "a reply", "and <|end|> two"]):
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
        rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ours.encode_chat(said[::2], said[1::2]) == theirs(rendered, add_special_tokens=False)["input_ids"]


def test_a_leading_token_is_added_once(folder: Path) -> None:
    """Catches a chat prompt with two BOS: one from the template, one from the tokenizer's post-processor."""
    from tokenizers import Tokenizer as Backend
    from tokenizers.processors import TemplateProcessing

    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", END_ID)])
    backend.save(str(folder / "tokenizer.json"))
    edit_json(folder / "tokenizer_config.json", bos_token="<|end|>")
    (folder / "chat_template.jinja").write_text("{{ bos_token + messages[0]['content'] }}")
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("x").count(END_ID) == 1
    assert tokenizer.encode_chat(["x"]) == tokenizer.encode("x")


def test_fingerprint_tells_equal_sizes_apart(tmp_path: Path) -> None:
    loaded = []
    orders = {"a": SPECIAL_TOKENS, "b": SPECIAL_TOKENS, "c": tuple(reversed(SPECIAL_TOKENS))}
    for name, tokens in orders.items():
        (tmp_path / name).mkdir()
        write_tokenizer(tmp_path / name, special_tokens=tokens)
        loaded.append(Tokenizer.load(tmp_path / name))
    first, same, other = loaded
    assert first.fingerprint == same.fingerprint
    assert first.size == other.size == 260
    assert first.fingerprint != other.fingerprint


def test_stop_tokens_come_from_the_most_specific_file(folder: Path) -> None:
    assert Tokenizer.load(folder).eos_ids == {END_ID}
    write_json(folder / "config.json", {"eos_token_id": 7})
    assert Tokenizer.load(folder).eos_ids == {7}
    write_json(folder / "generation_config.json", {"eos_token_id": [8, 9]})
    assert Tokenizer.load(folder).eos_ids == {8, 9}
    write_json(folder / "generation_config.json", {"temperature": 0.6})
    assert Tokenizer.load(folder).eos_ids == {7}


def test_no_stop_token_declared(folder: Path) -> None:
    write_json(folder / "tokenizer_config.json", {})
    assert Tokenizer.load(folder).eos_ids == frozenset()


@pytest.mark.parametrize("nested", [False, True])
def test_template_inside_the_tokenizer_config(folder: Path, nested: bool) -> None:
    expected = Tokenizer.load(folder).encode_chat(["hello"])
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    listed = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": template}]
    edit_json(folder / "tokenizer_config.json", chat_template=listed if nested else template)
    assert Tokenizer.load(folder).encode_chat(["hello"]) == expected


def test_no_template(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template=False)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("raw text still works")
    with pytest.raises(ModelError, match="no chat template"):
        tokenizer.encode_chat(["hello"])


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 // 0 }}", "division or modulo by zero"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
    ],
)
def test_template_that_fails(folder: Path, template: str, reason: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ModelError, match=f"2 user turns; .*{reason}"):
        Tokenizer.load(folder).encode_chat(["one", "two"], ["reply"])


def test_text_and_files_that_cannot_be_used(folder: Path) -> None:
    with pytest.raises(ModelError, match="a lone surrogate"):
        Tokenizer.load(folder).encode("half of a pair: \ud83d")
    (folder / "chat_template.jinja").unlink()
    edit_json(folder / "tokenizer_config.json", chat_template=[7])
    assert Tokenizer.load(folder).template is None
    edit_json(folder / "tokenizer_config.json", chat_template=7)
    with pytest.raises(ModelError, match="the chat template cannot be used"):
        Tokenizer.load(folder)
    edit_json(folder / "tokenizer_config.json", chat_template=None)
    write_json(folder / "generation_config.json", {"eos_token_id": [{}]})
    with pytest.raises(ModelError, match="eos_token_id: expected token ids, got"):
        Tokenizer.load(folder)


def test_no_turns(folder: Path) -> None:
    with pytest.raises(ValueError, match="at least one user turn"):
        Tokenizer.load(folder).encode_chat([])
    with pytest.raises(ValueError, match="expected one to each of 1 earlier turns, got 0"):
        Tokenizer.load(folder).encode_chat(["one", "two"])


def test_thinking_is_switched_where_the_template_knows_it(folder: Path) -> None:
    assert not Tokenizer.load(folder).can_think
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}{{ enable_thinking | default('own') }}")
    told = {mode: Tokenizer.load(folder, mode) for mode in (None, True, False)}
    assert told[None].can_think and told[None].template == told[True].template
    for mode, word in ((None, "own"), (True, "True"), (False, "False")):
        assert told[mode].encode_chat(["x"]) == told[mode].encode(f"x{word}")


def test_missing_and_malformed_file(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer.load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(folder)
