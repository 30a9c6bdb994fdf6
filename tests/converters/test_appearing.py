"""A directory appears complete or not at all, and nothing that was there is touched."""

import os

import pytest

from converters.appearing import appearing, check_free
from pipeline.errors import ConversionError, StoreError


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_what_was_written_appears_with_ordinary_permissions(tmp_path):
    with appearing(tmp_path / "a" / "b") as directory:
        (directory / "inner").mkdir()
        (directory / "inner" / "file").write_text("text")
        assert not (tmp_path / "a" / "b").exists()
    assert (tmp_path / "a" / "b" / "inner" / "file").read_text() == "text"
    assert names(tmp_path / "a") == ["b"]
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("fault", [KeyboardInterrupt, MemoryError, ValueError, SystemExit])
def test_any_end_but_a_good_one_leaves_nothing(tmp_path, fault):
    with pytest.raises(fault), appearing(tmp_path / "out") as directory:
        (directory / "half").write_text("written")
        raise fault
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), PermissionError(13, "Permission denied"), OSError(5, "I/O error")]
)
def test_a_disk_that_refuses_is_named_and_leaves_nothing(tmp_path, error):
    with pytest.raises(StoreError, match=rf"out: cannot be written: .*{error.strerror}; nothing was left behind"):  # noqa: SIM117
        with appearing(tmp_path / "out") as directory:
            (directory / "half").write_text("written")
            raise error
    assert names(tmp_path) == []


def test_a_disk_that_refuses_to_flush_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    def refuse(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StoreError, match="No space left"), appearing(tmp_path / "out") as directory:
        (directory / "file").write_text("written")
    assert names(tmp_path) == []


def test_a_directory_that_fills_meanwhile_is_left_alone(tmp_path):
    with pytest.raises(StoreError, match="cannot be written"), appearing(tmp_path / "out") as directory:
        (directory / "file").write_text("mine")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.txt").write_text("ten years")
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["thesis.txt"]


def test_files_and_full_directories_are_not_free(tmp_path):
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty").mkdir()
    check_free(tmp_path / "empty")
    check_free(tmp_path / "absent")
    for taken in (tmp_path, tmp_path / "file"):
        with pytest.raises(ConversionError, match="exists and is not empty; nothing is ever overwritten"):
            check_free(taken)


def test_a_place_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(StoreError, match=r"file/out: cannot be written"), appearing(tmp_path / "file" / "out"):
        pass
