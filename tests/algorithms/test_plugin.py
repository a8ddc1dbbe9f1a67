"""An algorithm from outside: the drafter of docs/add_an_algorithm.md, taken from the page, and every message on it."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from algorithms.algorithm import Algorithm, DraftTree
from algorithms.lookup import NGram
from algorithms.registry import GROUP, PACKAGES_VARIABLE, available
from specdec_kernels import build_tree
from tests.algorithms.toy import Setup, answers, changed, random_target, requests, run
from tests.programs import run_python

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/add_an_algorithm.md").read_text(encoding="utf-8")
TARGET = random_target()


def block(title: str, language: str) -> str:
    """The code block of the page behind the file name `title`."""
    return re.search(rf"^`{re.escape(title)}`.*?^```{language}\n(.*?)^```", PAGE, re.M | re.S)[1]  # type: ignore[index]


SOURCE = block("echo_drafter.py", "python")
ENTRY_POINT = re.search(r'^echo = "(.*)"$', block("pyproject.toml", "toml"), re.M)[1]  # type: ignore[index]


@pytest.fixture(scope="module")
def kind(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The class of the page."""
    path = tmp_path_factory.mktemp("page") / "echo_drafter.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("echo_drafter", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["echo_drafter"] = module
    spec.loader.exec_module(module)
    return module.Echo


@pytest.mark.parametrize("level", ["none", "step"])
def test_the_example_is_lossless(kind: Any, level: str) -> None:
    """Greedy and sampled, in batches that requests enter and leave, captured or not; and drafts are accepted."""
    asked = [changed(r, temperature=(0.0, 0.8)[r.id % 2]) for r in requests(6, 24)]
    drafter = kind(kind.Config(draft_len=4), TARGET, None)
    got = run(drafter, asked, Setup(max_batch=4, graph=level), TARGET).completions
    assert [c.token_ids for c in got] == answers(asked, Setup(), TARGET)
    assert sum(sum(c.accepted_counts) for c in got) > 0


def install(folder: Path, entry_point: str = ENTRY_POINT, name: str = "echo") -> Path:
    """What `pip install` leaves of the page's package: a module and its metadata."""
    info = folder / "echo_drafter-0.1.dist-info"
    info.mkdir(parents=True)
    (folder / "echo_drafter.py").write_text(SOURCE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: echo-drafter\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {entry_point}\n")
    return folder


def command(folder: Path, site: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """run.py from `folder`, with `site` among the places that Python imports from."""
    known = {**os.environ, "PYTHONPATH": str(site), **environment}
    return run_python(str(ROOT / "run.py"), *arguments, cwd=folder, env=known)


def test_it_is_an_option_in_every_folder(tmp_path: Path) -> None:
    """Engine, report and records take it like a shipped one, without any YAML."""
    site, folder = install(tmp_path / "site"), tmp_path / "elsewhere"
    folder.mkdir()
    settings = ("algo=echo", "algo.draft_len=5", "data=code", "data.limit=2", "tracker=none", "runtime.impl=reference")
    done = command(folder, site, *settings, "sampling.max_new_tokens=12")
    assert done.returncode == 0, done.stderr
    (summary_file,) = folder.glob("outputs/**/summary.json")
    row = json.loads(summary_file.read_text())["rows"][-1]
    assert row["algo"] == "echo"
    assert row["lossless"] == {"checked": 2, "identical": 2, "near_ties": 0, "first_difference": None}
    assert row["tokens_per_step"] > 1.1
    assert "echo" in (summary_file.parent / "report.html").read_text()


def test_a_module_that_a_variable_names_is_an_option(tmp_path: Path) -> None:
    (tmp_path / "echo_drafter.py").write_text(SOURCE)
    words = ("algo=echo", "algo.draft_len=5", "--cfg=job")
    done = command(tmp_path, tmp_path, *words, **{PACKAGES_VARIABLE: "echo_drafter"})
    assert done.returncode == 0 and "name: echo" in done.stdout and "draft_len: 5" in done.stdout, done.stderr


def shown(message: str) -> None:
    """The page says what is said."""
    quoted = [text for text in re.findall(r"^\|[^|]*\| `(.*)` \|$", PAGE, re.M) if text in message]
    assert quoted, f"the page has no part of: {message}"


def test_its_settings_are_checked(tmp_path: Path) -> None:
    done = command(tmp_path, install(tmp_path / "site"), "algo=echo", "algo.draftlen=2")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    shown(done.stderr)


@pytest.mark.parametrize(("entry_point", "name"), [("echo_drafter:Eco", "echo"), ("echo_drafter:Echo", "eco")])
def test_entry_points_are_checked(tmp_path: Path, entry_point: str, name: str) -> None:
    done = command(tmp_path, install(tmp_path / "site", entry_point, name), "algo=echo")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    shown(done.stderr)


class Taken(NGram):
    """Another algorithm by the name of a shipped one."""


@dataclass
class Nameless:
    draft_len: int = 3


@pytest.mark.parametrize("mistake", ["no name", "no dataclass", "taken", "no class"])
def test_classes_are_checked(monkeypatch: pytest.MonkeyPatch, kind: Any, mistake: str) -> None:
    changes: dict[str, Callable[[], Any]] = {
        "no name": lambda: type("Echo", (kind,), {"Config": Nameless}),
        "no dataclass": lambda: type("Echo", (kind,), {"Config": object}),
        "taken": lambda: Taken,
        "no class": lambda: "echo",
    }
    offered = changes[mistake]()

    class Entry:
        name = getattr(offered, "name", "echo")
        value = "echo_drafter:Echo"

        def load(self) -> Any:
            return offered

    monkeypatch.setattr("algorithms.registry.entry_points", lambda group: [Entry()])
    with pytest.raises(ValueError) as caught:
        available()
    if mistake == "no class":
        assert "expected a subclass of algorithms.algorithm.Algorithm, got 'echo'" in str(caught.value)
    else:
        shown(str(caught.value))


def _shorter(draft: DraftTree) -> DraftTree:
    return replace(draft, tokens=draft.tokens[:, :-1])


def _branching(draft: DraftTree) -> DraftTree:
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 2]], dtype=torch.int32).repeat(len(draft.tokens), 1)
    return replace(draft, links=build_tree(parents, draft.links.positions[:, 0]))


@pytest.mark.parametrize(
    ("attributes", "change"),
    [({"max_depth": 0}, None), ({}, _shorter), ({}, _branching)],
    ids=["no depth", "too few tokens", "chain = False forgotten"],
)
@pytest.mark.parametrize("level", ["none", "step"])
def test_mistakes_of_the_drafter(
    kind: Any, level: str, attributes: dict[str, Any], change: Callable[[DraftTree], Any] | None
) -> None:
    """Each is told in one sentence, captured or not."""
    drafter: Algorithm = kind(kind.Config(), TARGET, None)
    for key, value in attributes.items():
        setattr(drafter, key, value)
    if change is not None:
        propose = drafter.propose
        drafter.propose = lambda batch: change(propose(batch))  # type: ignore[method-assign]
    with pytest.raises(ValueError) as caught:
        run(drafter, requests(1), Setup(max_batch=1, graph=level), TARGET)
    shown(str(caught.value))
    assert str(caught.value).startswith("algo=echo: ") and "\n" not in str(caught.value)


def test_a_draft_is_checked_once(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr("algorithms.step.step.check_draft", lambda a, batch, *_: seen.append(bool(batch.active[0])))
    for level, expected in {"none": [True], "step": [False, True]}.items():
        seen.clear()
        run(kind(kind.Config(), TARGET, None), requests(3), Setup(max_batch=2, graph=level), TARGET)
        assert seen == expected
