"""Where text comes from: what is found, what is refused, and what the digest sees."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pytest

from pipeline.data.sources import digests, is_remote, local_files, read_documents
from pipeline.errors import ParameterError


@dataclass(frozen=True)
class Text:
    source: str
    json_field: str | None = None


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "text" / "deep").mkdir(parents=True)
    (tmp_path / "text" / "b.txt").write_text("second")
    (tmp_path / "text" / "a.txt").write_text("first")
    (tmp_path / "text" / "deep" / "c.md").write_text("third")
    (tmp_path / "text" / ".hidden").write_text("never")
    return tmp_path


def names(source: str, root: Path) -> list[str]:
    return [document.name for document in read_documents(Text(source), root)]


def test_a_directory_gives_its_visible_files_in_order(corpus: Path) -> None:
    assert names("text", corpus) == ["a.txt", "b.txt", "deep/c.md"]


def test_a_glob_crosses_directories_with_two_stars(corpus: Path) -> None:
    assert names("text/*.txt", corpus) == ["a.txt", "b.txt"]
    assert names("text/**/*.md", corpus) == ["deep/c.md"]
    assert names(f"{corpus}/text/*.txt", Path("/")) == ["a.txt", "b.txt"]


def test_a_single_file_and_a_file_url_give_one_document(corpus: Path) -> None:
    assert names("text/a.txt", corpus) == ["a.txt"]
    assert names(f"file://{corpus}/text/a.txt", corpus) == ["a.txt"]


def test_the_standard_library_is_python_source_without_its_tests() -> None:
    found = [file.name for file in local_files("stdlib", Path())]
    assert "heapq.py" in found
    assert "asyncio/base_events.py" in found
    assert not [name for name in found if name.startswith(("test/", "site-packages/", "idlelib/", "_sysconfigdata"))]
    assert found == sorted(found)


def test_json_lines_give_one_document_a_line(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n')
    documents = list(read_documents(Text("data.jsonl", "text"), tmp_path))
    assert [(item.name, item.text) for item in documents] == [("data.jsonl:1", "one"), ("data.jsonl:3", "two")]


def test_every_bad_json_line_is_named_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "one"}\n{"test": "x"}\n{oops\n["list"]\n{"text": 3}\n')
    with pytest.raises(ParameterError) as caught:
        list(read_documents(Text("data.jsonl", "text"), tmp_path))
    message = str(caught.value)
    assert "4 bad of 5 lines" in message
    assert "data.jsonl:2: no field 'text'; it has: test; did you mean 'test'?" in message
    assert "data.jsonl:3: not JSON" in message
    assert "data.jsonl:4: a JSON object is wanted, found list" in message
    assert "data.jsonl:5: field 'text' holds int" in message


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("nothing.txt", "no such file or directory"),
        ("*.nothing", "no file matches"),
        ("empty", "holds no file"),
        ("blank.txt", "every file is empty"),
    ],
)
def test_a_source_that_gives_nothing_is_refused(tmp_path: Path, source: str, found: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(ParameterError, match=found) as caught:
        list(read_documents(Text(source), tmp_path))
    assert caught.value.exit_code == 2
    assert source in caught.value.message


def test_bytes_that_are_not_utf8_are_named_by_line(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"fine\nalso fine\ncaf\xe9\n")
    with pytest.raises(ParameterError, match=r"latin\.txt:3: not UTF-8 \(byte 0xe9"):
        list(read_documents(Text("latin.txt"), tmp_path))


def test_the_digest_follows_names_and_contents_but_not_places(corpus: Path, tmp_path: Path) -> None:
    before = digests(Text("text"), corpus)
    moved = corpus / "elsewhere"
    (corpus / "text").rename(moved)
    assert digests(Text("elsewhere"), corpus) == before
    (moved / "a.txt").write_text("changed")
    assert digests(Text("elsewhere"), corpus) != before
    (moved / "a.txt").write_text("first")
    (moved / "a.txt").rename(moved / "z.txt")
    assert digests(Text("elsewhere"), corpus) != before


def test_remote_text_is_read_and_digested_through_fsspec() -> None:
    files = fsspec.filesystem("memory")
    files.pipe_file("/sources-test/a.txt", b"alpha")
    files.pipe_file("/sources-test/sub/b.txt", b"beta")
    root = Path()
    assert is_remote("memory://sources-test")
    assert names("memory://sources-test", root) == ["a.txt", "sub/b.txt"]
    assert names("memory://sources-test/a.txt", root) == ["a.txt"]
    assert names("memory://sources-test/**/*.txt", root)[-1].endswith("b.txt")
    before = digests(Text("memory://sources-test"), root)
    assert digests(Text("memory://sources-test"), root) == before
    files.pipe_file("/sources-test/a.txt", b"alphabet")
    assert digests(Text("memory://sources-test"), root) != before


@pytest.mark.parametrize("source", ["memory://nothing-here", "nosuchprotocol://x"])
def test_a_remote_source_that_cannot_be_opened_is_refused(source: str) -> None:
    with pytest.raises(ParameterError, match="source '"):
        digests(Text(source), Path())


def test_planning_a_local_source_loads_no_fsspec_and_no_numpy() -> None:
    code = (
        "import sys, pipeline.data.sources; print([m for m in ('fsspec', 'numpy', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
