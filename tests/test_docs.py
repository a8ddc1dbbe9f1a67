"""The pages in docs/ name what exists."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from specdec_kernels import FAMILIES

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MAX_README_LINES = 160
MAX_STEPS_OF_A_REQUEST = 10


def steps_of_a_request() -> list[str]:
    """Dotted names in the table of `docs/architecture.md`."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    return re.findall(r"^\| \d+ \| `([\w.]+)` \|", text, re.M)


def resolved(name: str) -> object:
    """The object that a dotted name names."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            value: object = import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            value = getattr(value, part)
        return value
    raise ModuleNotFoundError(name)


def test_the_way_of_a_request_has_at_most_ten_functions() -> None:
    assert 1 < len(steps_of_a_request()) <= MAX_STEPS_OF_A_REQUEST


@pytest.mark.parametrize("name", steps_of_a_request())
def test_the_way_of_a_request_names_functions(name: str) -> None:
    assert callable(resolved(name))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.S)
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_file_of_rows_is_cited() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    files = {path.name for path in (ROOT / "experiments/results").iterdir()}
    assert files == set(re.findall(r"experiments/results/([\w.-]+)\)", text))


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_headings_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.S)
    links = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", text)
    pages = [(path, anchor) for path, anchor in links if not path or path.endswith(".md")]
    assert [a for path, a in pages if a not in anchors(page.parent / path if path else page)] == []


def documented_commands() -> list[tuple[str, list[str]]]:
    """(name of the configuration, settings) of each command in a block of docs/ that is one configuration."""
    programs = {"run.py": "config", "-m experiments.train": "train"}
    found = []
    for page in PAGES[1:]:
        blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
        for line in "".join(text for language, text in blocks if language in ("", "bash", "sh")).splitlines():
            typed = re.match(r"(?:python|torchrun \S+) (run\.py|-m experiments\.train)( .*)", line)
            if typed is None or " --" in typed[2] or " -m " in typed[2] or "resume=" in typed[2] or "…" in typed[2]:
                continue
            words = shlex.split(typed[2].partition(" #")[0])
            if (programs[typed[1]], words) not in found:
                found.append((programs[typed[1]], words))
    return found


@pytest.mark.parametrize(("name", "words"), documented_commands(), ids=lambda each: str(each)[:60])
def test_commands_in_docs_compose(name: str, words: list[str]) -> None:
    import experiments.train  # noqa: F401  (its schemas)
    from experiments.app.compose import register
    from experiments.sweep.main import long_name

    register()
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        assert compose(name, overrides=[long_name(word) for word in words])


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


def test_the_kernel_index_names_everything_public_once() -> None:
    page = (ROOT / "docs/kernels.md").read_text(encoding="utf-8")
    index = page[page.index("\n## ") :]
    named = re.findall(r"^\| `(\w+)` \|", index, re.M)
    named += [
        name
        for line in re.findall(r"^Types and constants: (.*?)\.$", index, re.M | re.S)
        for name in re.findall(r"\w+", line)
    ]
    public = [name for family in FAMILIES for name in import_module(f"specdec_kernels.{family}").__all__]
    assert sorted(named) == sorted(public)
