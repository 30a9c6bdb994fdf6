"""Several packed datasets as one.

Owns the directory of a mixture (`manifest.json`, and each dataset under `parts/NAME`), its opening and its rows. Knows
nothing of frameworks. The one decision: a mixture is a dataset like any other, so whatever takes rows of tokens takes
it: training, evaluation, parity.

Shapes: N rows, S = T + 1 ids of a row.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.data.manifest import AGAIN, MANIFEST_NAME, manifest_digest, read_raw_manifest
from pipeline.data.mixture_order import MixtureOrder
from pipeline.data.order import rank_positions
from pipeline.data.packed import PackedDataset
from pipeline.errors import ArtifactError, ParameterError

MIXTURE = "mixture"
"""The manifest's `kind`."""
SCHEMA = 1
PARTS_DIRECTORY = "parts"
_Ints = npt.NDArray[np.int64]
_Rows = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class MixtureDataset:
    """Rows of several datasets, in fixed proportions."""

    directory: Path
    datasets: Mapping[str, PackedDataset]
    parts: tuple[int, ...]
    """Rows of each dataset in one period."""

    @classmethod
    def open(
        cls, directory: Path, *, verify: bool = True, workers: int = 1, cache_bytes: int | None = None
    ) -> "MixtureDataset":
        """Open the directory of a mixture; arguments and errors as `PackedDataset.open`."""
        raw = read_raw_manifest(directory)
        path = directory / MANIFEST_NAME
        if raw.get("kind") != MIXTURE or raw.get("schema") != SCHEMA:
            raise ArtifactError(
                f"{path}: kind {raw.get('kind')!r}, schema {raw.get('schema')!r}; wanted {MIXTURE!r}, {SCHEMA}",
                hint=AGAIN,
            )
        try:
            parts = {str(name): int(part) for name, part in raw["parts"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArtifactError(f"{path}: damaged ({type(error).__name__}: {error})", hint=AGAIN) from error
        datasets = {
            name: PackedDataset.open(
                directory / PARTS_DIRECTORY / name,
                verify=verify,
                workers=workers,
                cache_bytes=None if cache_bytes is None else cache_bytes // len(parts),
            )
            for name in parts
        }
        check_alike(datasets)
        return cls(directory=directory, datasets=datasets, parts=tuple(parts.values()))

    @property
    def sequence_length(self) -> int:
        """T, tokens in a training row."""
        return self._first.sequence_length

    @property
    def vocabulary_size(self) -> int:
        """Every id is below this."""
        return self._first.vocabulary_size

    @property
    def tokenizer_path(self) -> Path:
        """The `tokenizer.json`, the same in every dataset."""
        return self._first.tokenizer_path

    @property
    def digest(self) -> str:
        """sha256 of what the mixture holds, hexadecimal."""
        own = manifest_digest(self.directory)
        return hashlib.sha256("".join([own, *(part.digest for part in self.datasets.values())]).encode()).hexdigest()

    @property
    def waiting_for(self) -> str | None:
        """Shards that are being fetched, in words."""
        return "; ".join(filter(None, (dataset.waiting_for for dataset in self.datasets.values()))) or None

    def num_rows(self, split: str) -> int:
        """Rows of `train` in all datasets; of `validation` as many as keep the proportions with no row twice."""
        counts = [dataset.num_rows(split) for dataset in self.datasets.values()]
        if split == "train":
            return sum(counts)
        period = sum(self.parts)
        return max(1, min(count * period // part for count, part in zip(counts, self.parts, strict=True)))

    def rows(self, split: str, indices: _Ints) -> _Rows:
        """Rows by index, int32 [N, S]: of `train` dataset after dataset, of `validation` in the mixture's proportions.

        Raises:
            IndexError: an index is outside the split.
        """
        return self._gather(*self._located(split, indices), read=lambda dataset, rows: dataset.rows(split, rows))

    def positions(self, split: str, indices: _Ints) -> _Rows:
        """Place of each token in its document, int32 [N, S]; errors as `rows`."""
        return self._gather(*self._located(split, indices), read=lambda dataset, rows: dataset.positions(split, rows))

    def train_rows(self, step: int, *, rows_per_step: int, rank: int, world_size: int, seed: int) -> _Rows:
        """What `rank` trains on in step `step`, as `PackedDataset.train_rows`."""
        positions = rank_positions(step, rows_per_step=rows_per_step, rank=rank, world_size=world_size)
        return self._gather(*self.row_at(positions, seed=seed), read=lambda dataset, rows: dataset.rows("train", rows))

    def train_positions(self, step: int, *, rows_per_step: int, rank: int, world_size: int, seed: int) -> _Rows:
        """`positions` of the rows that `train_rows` gives for the same arguments."""
        positions = rank_positions(step, rows_per_step=rows_per_step, rank=rank, world_size=world_size)
        return self._gather(
            *self.row_at(positions, seed=seed), read=lambda dataset, rows: dataset.positions("train", rows)
        )

    def row_at(self, positions: _Ints, *, seed: int) -> tuple[_Ints, _Ints]:
        """Dataset and training row in it at each position of the global order, int64 [N] each."""
        order = MixtureOrder(parts=self.parts, seed=seed)
        sources = order.sources(positions)
        rows = np.empty(len(positions), dtype=np.int64)
        for number, dataset in enumerate(self.datasets.values()):
            chosen = sources == number
            own = order.own_positions(positions[chosen], source=number)
            rows[chosen] = dataset.row_at(own, seed=seed)
        return sources, rows

    def step_rows(self, step: int, *, rows_per_step: int, seed: int) -> Mapping[str, list[int]]:
        """Training rows of all ranks in step `step` (from 0), of each dataset."""
        sources, rows = self.row_at(rank_positions(step, rows_per_step=rows_per_step), seed=seed)
        return {name: rows[sources == number].tolist() for number, name in enumerate(self.datasets)}

    def epochs(self, step: int, *, rows_per_step: int, seed: int) -> Mapping[str, float]:
        """Passes over the training rows of each dataset after `step` steps."""
        order, end = MixtureOrder(parts=self.parts, seed=seed), np.array([step * rows_per_step])
        return {
            f"epoch_{name}": float(order.own_positions(end, source=number)[0]) / dataset.num_rows("train")
            for number, (name, dataset) in enumerate(self.datasets.items())
        }

    @property
    def _first(self) -> PackedDataset:
        return next(iter(self.datasets.values()))

    def _located(self, split: str, indices: _Ints) -> tuple[_Ints, _Ints]:
        indices = np.asarray(indices, dtype=np.int64)
        if len(indices) and (indices.min() < 0 or indices.max() >= self.num_rows(split)):
            raise IndexError(
                f"rows of {split!r} are 0 to {self.num_rows(split) - 1}, asked {indices.min()} to {indices.max()}"
            )
        if split != "train":
            order = MixtureOrder(parts=self.parts, seed=0)
            sources = order.sources(indices)
            own = [order.own_positions(indices, source=number) for number in range(len(self.parts))]
            return sources, np.choose(sources, own)
        ends = np.cumsum([dataset.num_rows(split) for dataset in self.datasets.values()], dtype=np.int64)
        sources = np.searchsorted(ends, indices, side="right")
        return sources, indices - np.concatenate([[0], ends])[sources]

    def _gather(self, sources: _Ints, rows: _Ints, *, read: Callable[[PackedDataset, _Ints], _Rows]) -> _Rows:
        out = np.empty((len(rows), self.sequence_length + 1), dtype=np.int32)
        for number, dataset in enumerate(self.datasets.values()):
            chosen = sources == number
            if chosen.any():
                out[chosen] = read(dataset, rows[chosen])
        return out


def check_alike(datasets: Mapping[str, PackedDataset]) -> None:
    """Rows of all of them fit one model.

    Raises:
        ParameterError: tokenizers or row lengths differ; lists them.
    """
    facts = {name: (dataset.sequence_length, dataset.manifest.tokenizer_sha256) for name, dataset in datasets.items()}
    if len(set(facts.values())) > 1:
        shown = "\n".join(
            f"  {name}: sequence_length {length}, tokenizer sha256 {digest[:12]}"
            for name, (length, digest) in facts.items()
        )
        raise ParameterError(
            f"datasets of a mixture have one tokenizer and one sequence_length; found:\n{shown}",
            hint="give each `data.text` the same `sequence_length` and the same `tokenizer`",
        )


def write_mixture(directory: Path, *, parts: Mapping[str, int], source: Mapping[str, Any]) -> None:
    """Write `manifest.json` over the datasets under `parts/`, by name the rows of a period."""
    manifest = {"kind": MIXTURE, "schema": SCHEMA, "parts": dict(parts), "source": dict(source)}
    (directory / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
