"""The documentation says what is there: verbs, files, links, stage kinds."""

import importlib.util
import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import converters
from pipeline.cli.observers import make_observer
from pipeline.cli.verbs import VERBS
from pipeline.execution.driver import RunOptions, run_flow
from pipeline.plan.graph import open_flow
from pipeline.tracking.memory_tracker import MemoryTracker

PROJECT = Path(__file__).resolve().parents[2]
README = (PROJECT / "README.md").read_text(encoding="utf-8")
PAGES = sorted((*PROJECT.glob("*.md"), *PROJECT.glob("docs/**/*.md")))
IMAGES = PROJECT / "docs" / "images"
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
MAP_PACKAGE = re.compile(r"^#### `((?:pipeline|converters)[\w/]*)/`: \S")
MAP_FILE = re.compile(r"^- `(\w+\.py)`: (\S.*)$")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
MIN_PHRASE_WORDS = 2


def relative(path: Path) -> str:
    return path.relative_to(PROJECT).as_posix()


def file_map() -> tuple[list[str], list[tuple[str, str]]]:
    """Packages, and files with their phrases, in the order of the README."""
    packages: list[str] = []
    files: list[tuple[str, str]] = []
    for line in README.splitlines():
        if package := MAP_PACKAGE.match(line):
            packages.append(package[1])
        elif line.startswith("#"):
            continue
        elif packages and (file := MAP_FILE.match(line)):
            files.append((f"{packages[-1]}/{file[1]}", file[2]))
    return packages, files


def load_generator():
    spec = importlib.util.spec_from_file_location("docs_generate", PROJECT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", ["stages.md", "families.md"])
def test_generated_pages_are_current(name: str) -> None:
    generator = load_generator()
    assert (PROJECT / "docs" / name).read_text(encoding="utf-8") == generator.PAGES[name](), "run docs/generate.py"


def test_the_file_map_names_every_file_and_package_once() -> None:
    tree = [path for folder in ("pipeline", "converters") for path in (PROJECT / folder).rglob("*.py")]
    packages = {relative(path.parent) for path in tree if path.name == "__init__.py"}
    wanted = {relative(path) for path in tree if path.name != "__init__.py"}
    named_packages, named_files = file_map()
    named = [name for name, _ in named_files]
    assert sorted(wanted - set(named)) == [], "files that the map in README.md lacks"
    assert sorted(set(named) - wanted) == [], "files in the map that do not exist"
    assert sorted(packages ^ set(named_packages)) == [], "packages without a heading, or headings without a package"
    assert [name for name, count in Counter([*named, *named_packages]).items() if count > 1] == []


def test_every_file_in_the_map_has_a_phrase() -> None:
    assert [name for name, phrase in file_map()[1] if len(phrase.split()) < MIN_PHRASE_WORDS] == []


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_relative_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        if "://" in link or link.startswith("mailto:") or (IMAGES in target.parents and not IMAGES.is_dir()):
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_verb_in_the_readme_exists_and_every_verb_is_in_it() -> None:
    inline = re.findall(r"`(?:[^`\n]*/)?pipeline ([a-z][a-z-]*)[^`\n]*`", README)
    in_blocks = re.findall(r"^(?:\$ )?pipeline ([a-z][a-z-]*)", "\n".join(FENCE.findall(README)), re.MULTILINE)
    named = {*inline, *in_blocks}
    assert sorted(named - set(VERBS)) == []
    assert sorted(set(VERBS) - named) == []


def test_every_decision_has_a_number_of_its_own_and_the_same_parts() -> None:
    pages = sorted((PROJECT / "docs" / "decisions").glob("[0-9]*.md"))
    assert [int(page.name[:4]) for page in pages] == list(range(1, len(pages) + 1))
    for page in pages:
        headings = re.findall(r"^## (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert headings == ["Context", "Decision", "Consequences", "Measured"], relative(page)


def test_the_example_of_a_stage_of_ones_own_runs(tmp_path: Path) -> None:
    page = (PROJECT / "docs" / "flows.md").read_text(encoding="utf-8")
    for name in ("count.yaml", "counting.py"):
        block = re.search(rf"^`{name}`.*?^```\w+\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        assert block, name
        (tmp_path / name).write_text(block[1], encoding="utf-8")
    (tmp_path / "text").mkdir()
    (tmp_path / ".pipeline").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text(f"line {number} of a small text\n" * 20, encoding="utf-8")
    result = run_flow(
        open_flow(tmp_path / "count.yaml", overrides=["limit=2"]),
        options=RunOptions(
            store_url=str(tmp_path / ".pipeline"), state_directory=tmp_path / ".pipeline", backend="inline"
        ),
        make_tracker=lambda _: MemoryTracker(),
        observer=make_observer(as_json=True),
        is_interrupted=lambda: False,
    )
    assert result.failure is None
    count = result.view.stages[1]
    assert [verdict.holds for verdict in count.gates] == [True]
    (written,) = (tmp_path / ".pipeline" / "artifacts" / str(count.fingerprint)).glob("*/counts/counts.json")
    assert len(json.loads(written.read_text())) == 2


def test_the_python_example_of_the_page_on_conversion_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (PROJECT / "docs" / "conversion.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    sizes = {"vocab_size": 101, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "head_dim": 6}
    config = LlamaConfig(num_attention_heads=8, num_key_value_heads=2, initializer_range=0.2, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "checkpoint")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exec(compile(example, "docs/conversion.md", "exec"), {})
    assert capsys.readouterr().out == "family 21 leaves\nparity True ()\nround trip True\n"


def test_every_public_call_is_on_the_page_on_conversion() -> None:
    page = (PROJECT / "docs" / "conversion.md").read_text(encoding="utf-8")
    described = set(re.findall(r"^\| `(\w+)\(", page, re.MULTILINE))
    assert described == set(converters.__all__)
