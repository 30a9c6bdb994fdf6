import sys

import pytest

from pipeline.errors import TrackingError, UsageError
from pipeline.tracking.mlflow_ui import ui_command, ui_server


def test_the_command_listens_on_loopback_with_one_worker():
    command = ui_command("sqlite:////s/mlflow.db", port=5001)
    assert command[:4] == [sys.executable, "-m", "mlflow", "server"]
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--port") + 1] == "5001"
    assert command[command.index("--workers") + 1] == "1"
    assert command[command.index("--artifacts-destination") + 1] == "/s/mlflow-artifacts"


def test_a_tracking_server_needs_no_interface_of_ours(tmp_path):
    with (
        pytest.raises(UsageError, match=r"http://u:\*\*\*@tracker"),
        ui_server("http://u:pw@tracker", log_path=tmp_path / "log"),
    ):
        pass


def test_a_server_that_cannot_start_is_an_error_that_quotes_its_log(tmp_path):
    with (
        pytest.raises(TrackingError, match="exit code"),
        ui_server("nonsense://x", log_path=tmp_path / "logs" / "ui.log"),
    ):
        pass
