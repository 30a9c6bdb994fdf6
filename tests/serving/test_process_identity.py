"""Two processes are interchangeable where code, resources and environment are the same."""

from pathlib import Path

import pipeline.serving
from pipeline.serving.accelerator import process_identity
from pipeline.serving.accelerator.process_identity import PACKAGE


def identity(**changed: object) -> str:
    given = {"cpus": 1.0, "gpus": 0.5, "environment": {"A": "1"}} | changed
    return process_identity.process_identity(**given)


def test_the_code_is_that_of_serving_and_its_models() -> None:
    assert Path(pipeline.serving.__file__).parent == PACKAGE / "serving"
    assert (PACKAGE / "models").is_dir()


def test_another_share_or_variable_is_another_process() -> None:
    same = identity()
    assert same == identity()
    assert len({same, identity(cpus=2.0), identity(gpus=0.25), identity(environment={"A": "2"})}) == 4


def test_other_code_is_another_process(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "serving" / "http").mkdir(parents=True)
    (tmp_path / "models").mkdir()
    (tmp_path / "errors.py").write_text("")
    (tmp_path / "settings.py").write_text("")
    source = tmp_path / "models" / "product.cc"
    source.write_text("// a\n")
    file = tmp_path / "serving" / "http" / "deep.py"
    file.write_text("a = 1\n")
    for name in ("cluster/ledger.py", "spec/gate.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("")
    monkeypatch.setattr(process_identity, "PACKAGE", tmp_path)
    before = identity()
    file.write_text("a = 2\n")
    assert identity() != before
    for name in ("product.cc", "helpers.h"):
        before = identity()
        (tmp_path / "models" / name).write_text("// b\n")
        assert identity() != before, name
