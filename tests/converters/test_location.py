"""A model is where its path says, or a copy of what its URL holds now."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest
import torch
from safetensors.torch import save

from converters.location import locate
from converters.readers import open_source
from pipeline.errors import CheckpointError, ParameterError

FILES = {"model.safetensors": save({"w": torch.arange(3.0)}), "config.json": b"{}", "sub/notes.txt": b"text"}


@pytest.fixture
def url(request):
    """A directory in a store in memory, of this test alone."""
    root = f"/{request.node.name}"
    files = fsspec.filesystem("memory")
    for name, content in FILES.items():
        files.pipe_file(f"{root}/{name}", content)
    yield f"memory:/{root}"
    files.rm(root, recursive=True)


def test_path_is_given_back(tmp_path):
    assert locate(str(tmp_path)) == tmp_path
    assert locate(f"file://{tmp_path}/x") == tmp_path / "x"


def test_directory_of_a_store_is_copied_whole(url, tmp_path):
    found = locate(url, cache=tmp_path / "cache")
    assert {str(path.relative_to(found)): path.read_bytes() for path in found.rglob("*") if path.is_file()} == FILES
    assert open_source(found).read("w").tolist() == [0, 1, 2]
    assert [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")] == []


def test_one_file_of_a_store_is_copied(url, tmp_path):
    found = locate(f"{url}/model.safetensors", cache=tmp_path / "cache")
    assert found.name == "model.safetensors"
    assert list(open_source(found).headers) == ["w"]


def test_copy_is_used_until_the_store_holds_something_else(url, tmp_path):
    first = locate(url, cache=tmp_path / "cache")
    (first / "config.json").write_bytes(b"marked")
    assert (locate(url, cache=tmp_path / "cache") / "config.json").read_bytes() == b"marked"
    fsspec.filesystem("memory").pipe_file(f"{url.removeprefix('memory:/')}/config.json", b'{"a": 1}')
    assert (locate(url, cache=tmp_path / "cache") / "config.json").read_bytes() == b'{"a": 1}'


def test_oldest_copy_makes_room(url, tmp_path):
    size, cache = sum(map(len, FILES.values())), tmp_path / "cache"
    first = locate(url, cache=cache)
    os.utime(first, (1, 1))
    second = locate(f"{url}/model.safetensors", cache=cache, max_cache_bytes=size + 10)
    assert second.is_file()
    assert not first.exists()
    with pytest.raises(CheckpointError, match=r"do not fit into .*: at most 0\.000 GB are kept"):
        locate(url, cache=cache, max_cache_bytes=10)


def test_processes_that_start_together_fetch_a_model_once(url, tmp_path, monkeypatch):
    fetched = []
    get_file = type(fsspec.filesystem("memory")).get_file

    def slowly(self, path, *args, **kwargs):
        fetched.append(path)
        time.sleep(0.1)
        return get_file(self, path, *args, **kwargs)

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "get_file", slowly)
    with ThreadPoolExecutor(3) as pool:  # the lock is one of open files, so threads hold it against each other too
        found = set(pool.map(lambda _: locate(url, cache=tmp_path / "cache"), range(3)))
    assert len(found) == 1
    assert len(fetched) == len(FILES)


def test_a_copy_that_is_being_fetched_is_not_removed_to_make_room(url, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    (cache / ".fetching-other").mkdir()
    (cache / ".fetching-other" / "part").write_bytes(b"x" * 1000)
    locate(url, cache=cache, max_cache_bytes=sum(map(len, FILES.values())) + 10)
    assert (cache / ".fetching-other" / "part").exists()


def test_nothing_there_is_named_and_nothing_kept(tmp_path):
    with pytest.raises(ParameterError, match="no such file"):
        locate("memory://nowhere/at/all", cache=tmp_path / "cache")
    with pytest.raises(ParameterError, match="cannot be opened"):
        locate("nonsense://x", cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_cache_that_others_may_write_to_is_refused(url, tmp_path):
    (tmp_path / "cache").mkdir(mode=0o777)
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(CheckpointError, match="others may write to it"):
        locate(url, cache=tmp_path / "cache")
