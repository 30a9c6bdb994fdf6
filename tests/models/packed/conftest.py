"""Every custom call, on every instruction set that this machine has."""

import os
from collections.abc import Iterator

import pytest
from compiler import compiler_is_missing

from pipeline.models.packed import attention, calls, product
from pipeline.settings import cache_directory


@pytest.fixture(params=[1, 2], ids=["AVX2", "AVX-512"])
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The custom call of one instruction set, in the place of the best one."""
    found = calls._support(str(cache_directory(os.environ)), most=request.param)
    if found.product is None:
        compiler_is_missing(found.reason)
    if ("PackedProduct512" in found.product) != (request.param == 2):
        pytest.skip("this processor has no AVX-512")
    for module in (product, attention):
        monkeypatch.setattr(module, "support", lambda: found)
    yield found.product
