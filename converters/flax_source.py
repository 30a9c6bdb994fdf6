"""A Flax model directory, read as the torch checkpoint that it came from.

Owns the way from a torch name to the leaves that hold it. Knows nothing of how leaves are stored. The one decision: the
conversion record says which leaves each tensor became, and the family's rule, run backwards, makes it again; nothing is
read before it is asked for.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from converters.conversion import CARRIED_FILE
from converters.families.registry import table_for
from converters.manifest import MANIFEST_FILE, Conversion, ConversionManifest
from converters.operations import Array
from converters.readers import open_source
from converters.record_inference import inferred_record
from converters.rules import Rule, match, render
from converters.source import BesideTheWeights, CheckpointSource, TensorHeader
from pipeline.errors import ArtifactError
from pipeline.models.checkpoint import PARAMETERS_DIRECTORY
from pipeline.models.parameter_reader import StoredParameters
from pipeline.models.traced.program_file import PROGRAM_FILE

FORMAT = "flax"


class FlaxSource(BesideTheWeights):
    """See `CheckpointSource`. Tensors have the dtype of their leaves, whatever the checkpoint had."""

    format = FORMAT

    def __init__(self, directory: Path) -> None:
        """Read the conversion record and the headers of the leaves.

        A family's model without a record gets the one that its leaves and its config tell.

        Raises:
            ArtifactError: the record or the parameters are missing, malformed or not of each other.
            ConversionError: there is no record, and the leaves are not those that the config describes.
        """
        self.directory = directory
        self._leaves = StoredParameters.open(directory / PARAMETERS_DIRECTORY)
        self.manifest = self._record()
        self._conversions = {t.name: (c, i) for c in self.manifest.tensors for i, t in enumerate(c.sources)}
        self._rules = self._find_rules()
        self._carried: CheckpointSource | None = (
            open_source(directory / CARRIED_FILE) if self.manifest.carried else None
        )
        self._last: tuple[Conversion, list[Array]] | None = None
        self.headers = self._headers()

    def _record(self) -> ConversionManifest:
        if (self.directory / MANIFEST_FILE).is_file() or (self.directory / PROGRAM_FILE).is_file():
            return ConversionManifest.read(self.directory)
        return inferred_record(self.config(), leaves=self._leaves.headers)

    @staticmethod
    def recognises(path: Path) -> bool:
        """True for a directory with parameters in it."""
        return (path / PARAMETERS_DIRECTORY).is_dir()

    def read(self, name: str) -> Array:
        """See `CheckpointSource`."""
        name = self.manifest.tied.get(name, name)
        if self._carried is not None and name in self._carried.headers:
            return self._carried.read(name)
        conversion, index = self._conversions[name]
        return np.asarray(self._tensors_of(conversion)[index], order="C")

    def _tensors_of(self, conversion: Conversion) -> list[Array]:
        """What a conversion was made from; kept until the next, because many experts come from one leaf."""
        if self._last is None or self._last[0] is not conversion:
            self._last = None  # let go before the next is read
            arrays = [self._leaves.read(target.path) for target in conversion.targets]
            self._last = conversion, self._rules[conversion.sources[0].name].inverted().apply(arrays)
        made = self._last[1]
        if len(made) == 1:
            self._last = None
        return made

    def _headers(self) -> Mapping[str, TensorHeader]:
        headers = {
            name: TensorHeader(name=name, shape=conversion.sources[index].shape, dtype=conversion.targets[0].dtype)
            for name, (conversion, index) in self._conversions.items()
        }
        for name, same_as in self.manifest.tied.items():
            headers[name] = TensorHeader(name=name, shape=headers[same_as].shape, dtype=headers[same_as].dtype)
        return {**headers, **(self._carried.headers if self._carried else {})}

    def _find_rules(self) -> dict[str, Rule]:
        """The rule of each conversion, by the name of its first source; every leaf is held against the record."""
        is_traced = self.manifest.road == "trace"
        rules = () if is_traced else table_for(self.config(), names=tuple(self._conversions)).rules
        found, complaints = {}, []
        for conversion in self.manifest.tensors:
            rule = _same_name(conversion) if is_traced else _rule_of(conversion, rules)
            if rule is None:
                complaints.append(f"  {', '.join(target.path for target in conversion.targets)}: no rule makes it")
            else:
                found[conversion.sources[0].name] = rule
            for target in conversion.targets:
                leaf = self._leaves.headers.get(target.path)
                stored = f"{leaf.dtype} {list(leaf.shape)}" if leaf else "nothing"
                if stored != f"{target.dtype} {list(target.shape)}":
                    complaints.append(f"  {target.path}: {target.dtype} {list(target.shape)}, stored is {stored}")
        recorded = {target.path for conversion in self.manifest.tensors for target in conversion.targets}
        complaints += [f"  {path}: is not in the record" for path in sorted(self._leaves.headers.keys() - recorded)]
        if complaints:
            raise ArtifactError(
                f"{self.directory}: the conversion record and the parameters do not fit:\n" + "\n".join(complaints),
                hint="convert the checkpoint again",
            )
        return found


def open_model(path: Path) -> CheckpointSource:
    """A Flax model directory under its torch names, or a checkpoint.

    Raises:
        ArtifactError: the Flax model is damaged.
        CheckpointError: no reader knows what is there, or it is damaged.
    """
    return FlaxSource(path) if FlaxSource.recognises(path) else open_source(path)


def _rule_of(conversion: Conversion, rules: tuple[Rule, ...]) -> Rule | None:
    sources = [source.name for source in conversion.sources]
    targets = [target.path for target in conversion.targets]
    for rule in rules:
        captures = match(rule.sources[0], sources[0])
        if (
            captures is not None
            and [render(template, captures) for template in rule.sources] == sources
            and [render(template, captures) for template in rule.targets] == targets
        ):
            return rule
    return None


def _same_name(conversion: Conversion) -> Rule | None:
    """Leaves of a traced model have torch's layouts, under the module's names."""
    names = [source.name for source in conversion.sources]
    paths = [target.path for target in conversion.targets]
    return Rule.one(names[0], paths[0]) if len(names) == len(paths) == 1 else None
