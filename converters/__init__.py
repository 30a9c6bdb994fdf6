"""Foreign checkpoints to Flax and back: the calls that others may build on.

    import converters

    converters.convert("checkpoint", to="flax")
    report = converters.check_parity("checkpoint", "flax")
    model = converters.load("flax")
    converters.export("flax", to="back", format="safetensors")

Owns the names of the public calls and where each lives; docs/conversion.md describes them. Loads no framework: a call
is a dotted string that is resolved when its name is first used. The one decision: `import converters` costs nothing,
so the command line, and a program that may never convert anything, can import it at the top of a file.
"""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from converters.conversion import convert as convert
    from converters.conversion_preview import preview as preview
    from converters.difference import diff as diff
    from converters.exporting import export as export
    from converters.loading import load as load
    from converters.location import locate as locate
    from converters.parity import check_parity as check_parity
    from converters.readers import recognised as recognised

API: Mapping[str, str] = {
    "check_parity": "converters.parity:check_parity",
    "convert": "converters.conversion:convert",
    "diff": "converters.difference:diff",
    "export": "converters.exporting:export",
    "load": "converters.loading:load",
    "locate": "converters.location:locate",
    "preview": "converters.conversion_preview:preview",
    "recognised": "converters.readers:recognised",
}
"""Public name to the function behind it."""

__all__ = ["check_parity", "convert", "diff", "export", "load", "locate", "preview", "recognised"]


def __getattr__(name: str) -> Any:
    """Resolve a public call, once."""
    if name not in API:
        raise AttributeError(f"module 'converters' has no attribute {name!r}; it has: {', '.join(API)}")
    module, _, function = API[name].partition(":")
    value = getattr(importlib.import_module(module), function)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public calls, loaded or not."""
    return sorted({*globals(), *API})
