"""What a test does where nothing compiles the custom calls."""

import os
from typing import NoReturn

import pytest


def compiler_is_missing(reason: str) -> NoReturn:
    """Skip with the reason; where CI installs a compiler, that is a failure."""
    if os.environ.get("PIPELINE_REQUIRE_COMPILER") == "1":
        pytest.fail(reason)
    pytest.skip(reason)
