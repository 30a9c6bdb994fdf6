"""Names as the model knows them, without what training wrapped around it.

Owns the declared list of wrapper prefixes. Knows nothing of formats and families. The one decision: prefixes are
removed only when they are on the list, and two stored names that become one are an error, never a choice.
"""

from collections.abc import Iterable

from pipeline.errors import ConversionError

ANYWHERE = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module")
"""Left by torch.compile, activation checkpointing, FSDP1 and DeepSpeed, around any submodule."""
LEADING = ("module",)
"""Left by DistributedDataParallel, around the whole model only; further in, `module` may be a real name."""


def canonical(name: str) -> str:
    """The name without wrapper components: `module._orig_mod.model.norm.weight` is `model.norm.weight`."""
    components = [component for component in name.split(".") if component not in ANYWHERE]
    while len(components) > 1 and components[0] in LEADING:
        components.pop(0)
    return ".".join(components)


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Stored name by canonical name, in the given order.

    Raises:
        ConversionError: two stored names are one tensor without their wrappers; lists every such pair.
    """
    stored_by_name: dict[str, str] = {}
    complaints = []
    for stored in names:
        name = canonical(stored)
        if name in stored_by_name:
            complaints.append(f"  {name}: stored twice, as {stored_by_name[name]!r} and as {stored!r}")
        else:
            stored_by_name[name] = stored
    if complaints:
        raise ConversionError(
            f"{len(complaints)} tensors are stored under more than one name:\n" + "\n".join(complaints),
            hint="save the state dict of the model or of its wrapper, not of both",
        )
    return stored_by_name
