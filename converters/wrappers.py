"""Names as the model knows them, without what training wrapped around it.

Owns the declared list of wrapper prefixes, and the use of those that a family declares. Knows nothing of formats and
families. The one decision: prefixes are changed only when they are on a list, and two stored names that become one are
an error, never a choice.
"""

from collections.abc import Callable, Iterable, Sequence

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


def canonical_names(
    names: Iterable[str], *, prefixes: Sequence[str] = (), is_known: Callable[[str], bool] | None = None
) -> dict[str, str]:
    """Stored name by canonical name, in the given order.

    Args:
        names: as stored.
        prefixes: of the family (`FamilyTable.prefixes`), which one checkpoint has and another lacks.
        is_known: whether the family's rules take a name. A name that they take stays; another is given, relieved of or
            changed to one of the prefixes where that makes exactly one name that they take.

    Raises:
        ConversionError: two stored names are one tensor without their wrappers, or a name could be several of the
            family's; lists every such case.
    """
    stored_by_name: dict[str, str] = {}
    complaints = []
    for stored in names:
        name = canonical(stored)
        if is_known is not None and prefixes and not is_known(name):
            known = sorted(other for other in _with_other_prefix(name, prefixes) if is_known(other))
            if len(known) > 1:
                complaints.append(f"  {stored}: could be {' or '.join(known)}")
            elif known:
                (name,) = known
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


def _with_other_prefix(name: str, prefixes: Sequence[str]) -> set[str]:
    bare = {name, *(name.removeprefix(prefix) for prefix in prefixes)}
    return {*bare, *(prefix + rest for prefix in prefixes for rest in bare)} - {name}
