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
from converters.manifest import Conversion, ConversionManifest
from converters.operations import Array
from converters.readers import open_source
from converters.rules import Rule, match, render
from converters.source import BesideTheWeights, CheckpointSource, TensorHeader
from pipeline.errors import ArtifactError, CheckpointError
from pipeline.models.checkpoint import PARAMETERS_DIRECTORY, read_parameters

FORMAT = "flax"


class FlaxSource(BesideTheWeights):
    """See `CheckpointSource`. Tensors have the dtype of their leaves, whatever the checkpoint had."""

    format = FORMAT

    def __init__(self, directory: Path) -> None:
        """Read the conversion record.

        Raises:
            ArtifactError: it is missing or malformed, or names leaves that no rule of the family makes.
        """
        self.directory = directory
        self._manifest = ConversionManifest.read(directory)
        self._conversions = {t.name: (c, i) for c in self._manifest.tensors for i, t in enumerate(c.sources)}
        self._rules = self._find_rules()
        self._carried: CheckpointSource | None = (
            open_source(directory / CARRIED_FILE) if (directory / CARRIED_FILE).is_file() else None
        )
        self._leaves: dict[str, Array] | None = None
        self.headers = self._headers()

    @staticmethod
    def recognises(path: Path) -> bool:
        """True for a directory with parameters and a conversion record."""
        return (path / PARAMETERS_DIRECTORY).is_dir()

    def read(self, name: str) -> Array:
        """See `CheckpointSource`."""
        name = self._manifest.tied.get(name, name)
        if self._carried is not None and name in self._carried.headers:
            return self._carried.read(name)
        conversion, index = self._conversions[name]
        arrays = [self._leaf(target.path) for target in conversion.targets]
        made = self._rules[conversion.sources[0].name].inverted().apply(arrays)
        return np.ascontiguousarray(made[index])

    def _leaf(self, path: str) -> Array:
        if self._leaves is None:
            self._leaves = read_parameters(self.directory / PARAMETERS_DIRECTORY)
        if path not in self._leaves:
            raise CheckpointError(f"{self.directory}: the conversion record names the leaf {path}, which is not stored")
        return self._leaves[path]

    def _headers(self) -> Mapping[str, TensorHeader]:
        headers = {
            name: TensorHeader(name=name, shape=conversion.sources[index].shape, dtype=conversion.targets[0].dtype)
            for name, (conversion, index) in self._conversions.items()
        }
        for name, same_as in self._manifest.tied.items():
            headers[name] = TensorHeader(name=name, shape=headers[same_as].shape, dtype=headers[same_as].dtype)
        return {**headers, **(self._carried.headers if self._carried else {})}

    def _find_rules(self) -> dict[str, Rule]:
        """The rule of each conversion, by the name of its first source."""
        names = tuple(self._conversions)
        rules = () if self._manifest.road == "trace" else table_for(self.config(), names=names).rules
        found, complaints = {}, []
        for conversion in self._manifest.tensors:
            rule = _same_name(conversion) if self._manifest.road == "trace" else _rule_of(conversion, rules)
            if rule is None:
                complaints.append(f"  {', '.join(target.path for target in conversion.targets)}")
            else:
                found[conversion.sources[0].name] = rule
        if complaints:
            raise ArtifactError(
                f"{self.directory}: the conversion record names leaves that no rule makes:\n" + "\n".join(complaints),
                hint="convert the checkpoint again",
            )
        return found


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
    """Leaves of a traced model have torch's names and layouts."""
    names = [source.name for source in conversion.sources]
    paths = [target.path for target in conversion.targets]
    return Rule(sources=tuple(names), targets=tuple(paths)) if names == paths else None
