"""Every wrong input gets one screen that names it and what to type instead: no traceback, exit code 2, nothing left.

The program runs in this process, and reading weights is an error: what is wrong is found before.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

from experiments import kernel_bench
from experiments.app import cli
from experiments.app.schema import REPO_ROOT
from experiments.tasks.run import run_task

SCREEN_LINES, SCREEN_WIDTH = 12, 420
TINY = REPO_ROOT / "assets" / "tiny"
CPU = ("runtime.device=cpu", "runtime.impl=reference")
FILES = {
    "empty.jsonl": "",
    "good.jsonl": '{"prompt": "hi"}\n',
    "broken.jsonl": '{"prompt": "hi"}\n{"prompt": \n',
    "no_key.jsonl": '{"text": "hi"}\n',
    "grammar.jsonl": '{"prompt": "hi", "grammar": {"regx": "a"}}\n',
    "grammar_text.jsonl": '{"prompt": "hi", "grammar": "a"}\n',
    "grammars.jsonl": '{"prompt": "hi"}\n{"prompt": "hi", "grammar": {"ebnf": "root ::= x"}}\n',
    "schema.json": '{"type": "objekt"}',
    "long.jsonl": json.dumps({"prompt": "hi"}) + "\n" + json.dumps({"prompt": "word " * 700}) + "\n",
    "not_gzip.jsonl.gz": "plain text",
}
PLUGINS = {
    "broken_plugin.py": "raise RuntimeError('no licence')\n",
    "empty_plugin.py": "",
    "good_plugin.py": (
        "from dataclasses import dataclass\nfrom algorithms.algorithm import Algorithm\n\n"
        "class Echo(Algorithm):\n    name = 'echo'\n\n    @dataclass\n    class Config:\n"
        "        name: str = 'echo'\n        draft_len: int = 6\n        window: int = 4\n"
    ),
    "old_plugin.py": (
        "from algorithms.algorithm import Algorithm\n\nclass Old(Algorithm):\n    name = 'old'\n    Config = dict\n"
    ),
}


def wrong(typed: str, *holds: str) -> tuple[str, tuple[str, ...]]:
    """What is typed, and what the message must hold."""
    return typed, holds


WORDS = [
    wrong("algo = dflash", "'algo' is no setting", "expected key=value without spaces around '='"),
    wrong("data=code extra -m", "'extra' is no setting"),
    wrong("data=code --multi-run", "unrecognized arguments: --multi-run", "--help"),
    wrong("data.limit=1,2", "Ambiguous value for argument 'data.limit=1,2'", "add --multirun"),
    wrong("data=prompt|data.text=one (two", "one (two"),
]
KEYS = [
    wrong("temperature=1", "unknown key 'temperature'", "sampling.temperature=…", "keys of a run: name, baseline"),
    wrong("+text=hello", "text"),
    wrong("nosuch=1", "unknown key 'nosuch'", "keys of a run: name, baseline"),
    wrong("data.limt=3", "unknown key 'data.limt'", "data.limit=…"),
    wrong("+sampling.temprature=1", "unknown key 'sampling.temprature'", "sampling.temperature=…"),
    wrong("algo=eagle algo.step=3", "unknown key 'algo.step'", "algo.steps=…", "keys of algo: algo.name"),
    wrong("algo=mixed algo.second.steps=4", "unknown key 'algo.second.steps'", "'+algo.second.steps=4'"),
    wrong("algo=ngram algo.topk=3", "algo.topk=… (with algo=dflash)", "algo.num_nodes"),
    wrong("task.concurrency=[1]", "task.concurrency=… (with task=throughput)"),
    wrong("task=compare task.methods={x:{name:ngram}}", "task.methods.x", "'+task.methods={x:{name:ngram}}'"),
    wrong("task=compare task.methods={ngram:{name:ngram}}", "leaves the other methods", "task.only=[LABEL]"),
    wrong("task=compare task.methods=[dflash]", "ListConfig", "task.only=[LABEL]"),
    wrong("sampling.grammar.regex=[0-9]+", "in sampling.grammar.regex=[0-9]+", "quotes inside of quotes"),
    wrong("-m algo=ngram,eagle algo.num_node=3", "unknown key 'algo.num_node'", "algo.num_nodes=…"),
    wrong("+nested.typo=1", "unknown key 'nested'"),
    wrong("+limit=3", "unknown key 'limit'", "data.limit=…"),
    wrong("+runtime.pagesize=3", "unknown key 'runtime.pagesize'", "runtime.page_size=…"),
    wrong("~nosuch", "'nosuch' does not exist"),
    wrong("sampling.logit_bias={a:1.0}", "sampling.logit_bias", "Key a (str) is incompatible with (int)"),
]
OPTIONS = [
    wrong("algo=dflsh", "unknown algo 'dflsh'", "did you mean: algo=dflash", "autoregressive"),
    wrong("backend=fa5", "unknown backend 'fa5'", "backend=fa4"),
    wrong("experiment=dflash_fa", "unknown experiment 'dflash_fa'", "experiment=dflash_fa4"),
    wrong("-m algo=dflash,ngarm", "unknown algo 'ngarm'", "algo=ngram"),
]
VALUES = [
    wrong("sampling.grammar.regex=a sampling.grammar.ebnf=b", "sampling.grammar: expected one of", "regex and ebnf"),
    wrong("sampling.grammar.ebnf=nothing", "sampling.grammar.ebnf: it cannot be compiled", "prompt 1 of"),
    wrong("sampling.grammar.json_schema=@schema.json", "sampling.grammar.json_schema: it cannot be compiled", "objekt"),
    wrong("sampling.grammar.json_schema=@nowhere.json", "nowhere.json: cannot be read: No such file"),
    wrong("sampling.grammar.regex=''", "sampling.grammar.regex: expected text, got ''"),
    wrong("sampling.grammar.regx=a", "unknown key 'sampling.grammar.regx'", "sampling.grammar.regex=…"),
    wrong("sampling.grammar.regex=a sampling.min_tokens=3", "sampling.min_tokens: expected 0 with", "got 3"),
    wrong("sampling.grammar.regex=a sampling.ignore_eos=true", "sampling.ignore_eos: expected false with"),
    wrong("data=jsonl data.path=grammar.jsonl", "grammar.jsonl:1: key 'grammar'", "got 'regx'"),
    wrong("data=jsonl data.path=grammar_text.jsonl", "grammar_text.jsonl:1: key 'grammar': expected a mapping"),
    wrong("data=jsonl data.path=grammars.jsonl", "prompt 2 of 2", "grammars.jsonl:2", "sampling.grammar.ebnf"),
    wrong("sampling.temperature=hot", "'hot' of type 'str' could not be converted to Float", "sampling.temperature"),
    wrong("sampling.temperature=-1", "sampling.temperature", "got -1.0"),
    wrong("sampling.top_p=0", "sampling.top_p: expected above 0 and at most 1"),
    wrong("sampling.max_new_tokens=0", "sampling.max_new_tokens: expected at least 1, got 0"),
    wrong(f"sampling.seed={2**62}", "sampling.seed", f"got {2**62}"),
    wrong("sampling.logit_bias={5:nan}", "sampling.logit_bias: expected finite numbers"),
    wrong("sampling.logit_bias={99999:1.0}", "prompt 1 of 2: sampling.logit_bias", "vocabulary of 2048", "[99999]"),
    wrong("sampling.stop_strings=['']", "sampling.stop_strings", "no empty string"),
    wrong(f"runtime.num_pages={2**40}", "runtime.num_pages", f"1 to {2**31 - 1} or null"),
    wrong("runtime.device=cuda", "runtime.device=cuda", "runtime.device=cpu"),
    wrong("runtime.graph=step", "runtime.graph=step", "no CUDA graphs on the CPU", "runtime.graph=none"),
    wrong("runtime.impl=auto runtime.dtype=bfloat16", "interpreter computes bfloat16 wrongly", "runtime.dtype=float32"),
    wrong("runtime.tensor_parallel=2", "needs 2 processes, got 1", "torchrun --nproc-per-node=2"),
    wrong("paths.outputs=", "paths.outputs: expected a folder, got none"),
    wrong("paths.outputs=/proc/x", "the run folder cannot be created", "/proc/x", "paths.outputs"),
]
METHODS = [
    wrong("algo=eagle algo.steps=0", "algo.steps"),
    wrong("algo=ngram algo.max_ngram=64", "algo.max_ngram"),
    wrong("algo=suffix algo.shared=false algo.corpus=run.py", "algo.corpus: expected algo.shared=true with it"),
    wrong("algo=standalone algo.rule=lossy", "algo.rule", "'lossy'"),
    wrong("task=compare task.only=[nope]", "task.only: expected one of standalone", "'nope'", "+task.methods.LABEL"),
    wrong("task=compare task.data=[nope]", "task.data: expected one of arithmetic, code", "'nope'"),
    wrong("task=compare task.data=[]", "task.data: expected at least one value, got none"),
    wrong("task=compare +task.methods.mine={name:nope}", "task.methods.mine.name: expected one of", "'nope'"),
    wrong("task=compare +task.methods.mine={steps:3}", "task.methods.mine: expected a mapping with name=ALGORITHM"),
    wrong("task=compare +task.methods.mine={name:ngram,histries:3}", "no setting 'histries' (did you mean histories?)"),
    wrong("task=throughput task.concurrency=[0]", "task.concurrency: expected at least 1, got 0"),
    wrong("task=throughput runtime.num_pages=5", "runtime.num_pages cannot be given to task=throughput"),
    wrong("task=losslessness runtime.num_pages=64", "runtime.num_pages cannot be given to task=losslessness: each"),
    wrong("task=throughput algo=ngram +task.methods={ngram:{name:suffix}}", "task.methods.ngram: the run's algorithm"),
    wrong("task=losslessness task.low_precision=int8", "task.low_precision", "bfloat16", "'int8'"),
    wrong("task=losslessness task.temperature=0", "task.temperature: expected a finite number above 0"),
    wrong("task=graph_ablation task.levels=[none,all]", "task.levels", "none, draft, verify, step", "'all'"),
    wrong("task=losslessness task.backends=[fa5]", "task.backends: expected one of", "'fa5'"),
    wrong("task=adaptive task.batches=[0]", "task.batches: expected at least 1, got 0"),
    wrong("runtime.adaptive=true runtime.graph=verify", "expected runtime.graph=auto, none or step, got verify"),
    wrong("runtime.adaptive=true algo=autoregressive", "algo=autoregressive drafts none", "give another algo"),
]
MODELS = [
    wrong("model=local", "model.path has no value", "model.path=…"),
    wrong("model=local model.path=x", "algo=dflash needs a drafter", "model.draft_path or model.drafts.dflash"),
    wrong("model.drafts.eagel3=x", "unknown key 'model.drafts.eagel3'", "did you mean: model.drafts.eagle3=…"),
    wrong("+model.drafts.eagel3=x", "model.drafts.eagel3", "did you mean: algo=eagle3"),
    wrong("task=compare model.draft_path=x", "model.draft_path is the drafter of one algorithm", "task.only"),
    wrong("backend=flashinfer", "backend=flashinfer", "needs an NVIDIA GPU"),
    wrong("backend=hybrid backend.prefill=fa5", "backend.prefill", "'fa5'"),
]
PROMPTS = [
    wrong("data=jsonl", "data.path has no value"),
    wrong("data=jsonl data.path=nowhere.jsonl", "nowhere.jsonl: no such file"),
    wrong("data=jsonl data.path=.", "is a folder, expected a file"),
    wrong("data=jsonl data.path=empty.jsonl", "empty.jsonl: the file holds no prompts"),
    wrong("data=jsonl data.path=broken.jsonl", "broken.jsonl:2: not valid JSON"),
    wrong("data=jsonl data.path=no_key.jsonl", "no_key.jsonl:1", "'prompt'", "got 'text'"),
    wrong("data=jsonl data.path=not_gzip.jsonl.gz", "not_gzip.jsonl.gz: cannot be read"),
    wrong("data=jsonl data.path=long.jsonl", "prompt 2 of 2 (long.jsonl:2) is too long: 1,4", "+ 96 new tokens",
          "the model's context is 1,024", "data.skip_long=true"),
    wrong("sampling.max_new_tokens=2000 data.skip_long=true", "prompt 1 of 2 is too long", "2 of 2 prompts"),
    wrong("runtime.max_length=100", "prompt 1 of 2 is too long", "+ 96 new tokens", "runtime.max_length is 100"),
    wrong("task=compare sampling.max_new_tokens=960", "data=code: prompt", "task.skip_long=true"),
    wrong("data=prompt", "data.text has no value"),
    wrong("data=prompt data.text=", "data.text: expected the text of the prompt, got none"),
]  # fmt: skip
TABLE = dict(WORDS + KEYS + OPTIONS + VALUES + METHODS + MODELS + PROMPTS)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with files, in which no weight can be read."""
    for name, text in {**FILES, **PLUGINS}.items():
        (tmp_path / name).write_text(text)

    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("algorithms.models.loading.weights._read", read)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv(cli.FULL_ERROR, raising=False)
    return tmp_path


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the program says to these words, which it must refuse."""
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main(run_task)
    said = capsys.readouterr().err
    assert caught.value.code == 2, said
    assert said.startswith("error: ") and "Traceback" not in said
    lines = said.splitlines()
    assert len(lines) <= SCREEN_LINES and max(map(len, lines)) <= SCREEN_WIDTH
    return said


def typed_words(typed: str) -> list[str]:
    """Words as a shell splits them; `|` stands before a word with spaces. A CPU without kernels, unless asked for."""
    *plain, last = typed.split("|")
    words = [*" ".join(plain).split(), last] if plain else last.split()
    given = {word.split("=")[0] for word in words}
    return words + [word for word in CPU if word.split("=")[0] not in given]


@pytest.mark.parametrize("typed", TABLE)
def test_a_wrong_input_is_named_with_what_helps(
    typed: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(monkeypatch, capsys, *typed_words(typed))
    for text in TABLE[typed]:
        assert text in said, said
    left = [path.name for path in place.glob("outputs/**/*") if path.is_file()]
    assert left in ([], ["multirun.yaml"]), left


@pytest.fixture
def plugins(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plugin registers is forgotten behind the test; launchers would send it to processes that lack it."""
    Plugins.instance()  # Hydra's own register once, when they are first asked for, and stay
    store = ConfigStore.instance()
    monkeypatch.setattr(store, "repo", _copied(store.repo))
    for name in PLUGINS:
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)


def _copied(folder: dict[str, Any]) -> dict[str, Any]:
    """A copy of the folders of a config store, with the same nodes in them."""
    return {name: _copied(node) if isinstance(node, dict) else node for name, node in folder.items()}


@pytest.mark.parametrize(
    ("modules", "typed", "holds"),
    [
        ("nope", "algo=dflash", ["SPECDEC_ALGORITHMS=nope: cannot be imported: No module named 'nope'"]),
        ("broken_plugin", "algo=dflash", ["broken_plugin: cannot be imported: RuntimeError: no licence"]),
        ("empty_plugin", "algo=dflash", ["empty_plugin: expected a subclass of Algorithm in it, found none"]),
        ("old_plugin", "algo=old", ["old_plugin: expected Old.Config to be a dataclass"]),
        ("good_plugin", "algo=eco", ["unknown algo 'eco'", "did you mean: algo=echo"]),
        ("good_plugin", "algo=echo algo.topk=2", ["keys of algo: algo.name, algo.draft_len, algo.window\n"]),
        ("good_plugin", "algo=echo algo.drft_len=2", ["did you mean: algo.draft_len=…\n  keys of algo: algo.name, "]),
    ],
)
def test_a_wrong_plugin_is_named(
    modules: str, typed: str, holds: list[str], plugins: None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("SPECDEC_ALGORITHMS", modules)
    said = refusal(monkeypatch, capsys, *typed.split())
    for text in holds:
        assert text in said, said


@pytest.mark.parametrize(
    ("typed", "holds"),
    [
        ("famly=tree", "did you mean: family=…"),
        ("family=none", "family=none leaves nothing to measure"),
        ("family=trees", "family: expected one of all, none, "),
        ("family=tree shapes=nope", "no case of tree is called 'nope'"),
        ("repeats=0", "repeats: expected at least 1"),
        ("device=cuda", "sees no CUDA device"),
        ("peers=sdpa+cublas", "peers: expected one of all, none, sdpa"),
        ("budget_s=0", "budget_s: expected at least 1"),
        ("dtype=int8", "dtype: expected one of"),
    ],
)
def test_the_kernel_benchmark_refuses_in_words(
    typed: str, holds: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kernel_bench", *typed.split()])
    with pytest.raises(SystemExit) as caught:
        kernel_bench.main()
    said = capsys.readouterr().err
    assert caught.value.code == 2 and holds in said and "Traceback" not in said, said


def test_options_may_stand_behind_settings() -> None:
    typed = ["backend=fa4,torch", "~debug", "--cfg", "job", "+a.b=c d"]
    assert cli.arranged(typed) == ["--cfg", "job", "backend=fa4,torch", "~debug", "+a.b=c d"]
    assert cli.arranged(["data=code", "-m", "algo=dflash,ngram"]) == ["-m", "data=code", "algo=dflash,ngram"]


def test_a_full_disk_is_told_in_words(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "tracker=none"])
    with pytest.raises(SystemExit) as caught:
        cli.main(Mock(side_effect=OSError(28, os.strerror(28))))
    said = capsys.readouterr().err
    assert caught.value.code == 2 and "the disk is full" in said and "paths.outputs" in said and "Traceback" not in said
