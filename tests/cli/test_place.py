"""Options win over the cluster file, the file over the environment, the environment over defaults."""

from pathlib import Path

import pytest

from pipeline.cli.place import find_place


@pytest.fixture
def project_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "flows").mkdir()
    for name in ("PIPELINE_STORE", "MLFLOW_TRACKING_URI", "PIPELINE_RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_the_store_lies_in_the_project_wherever_the_command_is_typed(project_directory: Path) -> None:
    for start in (project_directory, project_directory / "flows"):
        place = find_place(start=start)
        assert place.store_url == str(project_directory / ".pipeline")
        assert place.state_directory == project_directory / ".pipeline"
        assert place.address is None
        assert place.tracking_uri is None


def test_each_source_of_settings_wins_over_the_next(project_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_STORE", "s3://environment/x")
    monkeypatch.setenv("PIPELINE_RAY_ADDRESS", "environment:1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://environment")
    place = find_place(start=project_directory)
    assert (place.store_url, place.address, place.tracking_uri) == (
        "s3://environment/x",
        "environment:1",
        "http://environment",
    )
    file = project_directory / "cluster.yaml"
    file.write_text("address: file:1\nstore: s3://file/x\ntracking_uri: http://file\n")
    place = find_place(start=project_directory, cluster=file)
    assert (place.store_url, place.address, place.tracking_uri) == ("s3://file/x", "file:1", "http://file")
    place = find_place(start=project_directory, cluster=file, store="option", address="option:1")
    assert place.address == "option:1"
    assert place.store_url == str(Path("option").absolute())


def test_local_processes_are_noted_locally_even_where_the_store_is_remote(project_directory: Path) -> None:
    place = find_place(start=project_directory, store="s3://bucket/x")
    assert place.state_directory == project_directory / ".pipeline"
