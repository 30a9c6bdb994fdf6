"""Chromium for the browser tests of this folder."""

import importlib.util
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def load_chromium():
    spec = importlib.util.spec_from_file_location("docs_chromium", DOCS / "chromium.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


chromium = load_chromium()
