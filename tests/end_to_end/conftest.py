"""Projects for the end-to-end tests, taken down again."""

from collections.abc import Callable, Iterator

import psutil
import pytest
from flow_project import Project, write_project


@pytest.fixture(scope="module")
def make_project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Project]]:
    """Makes projects and takes down what they left running."""
    made: list[Project] = []

    def make(flow: str) -> Project:
        project = write_project(tmp_path_factory.mktemp("project"), flow)
        made.append(project)
        return project

    yield make
    for project in made:
        pids = [process.pid for process in project.head_processes()] if (project.state / "head.json").exists() else []
        project.run("down")
        assert [pid for pid in pids if psutil.pid_exists(pid)] == []
