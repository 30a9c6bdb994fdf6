"""The plain model that adapters and the weights they were trained on make, as a checkpoint of the flow.

Owns the output of a `train.fsdp` that trained adapters: merged weights in the format of transformers, and the adapter
as peft writes it. Knows nothing of how they were trained. The one decision: tensors are merged and written one by one
in the stage's own process, so the next stages see a model like any other, and no rank has to hold the whole.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

from converters.operations import Array
from converters.safetensors_writer import write_sharded
from converters.source import TensorHeader
from converters.starting_weights import open_weights
from pipeline.artifacts.store import Store
from pipeline.errors import CheckpointError
from pipeline.stages.starting_point import StartingPoint
from pipeline.training.checkpoints.checkpoint import CONFIG_NAME, STATE_NAME, TOKENIZER_NAME
from pipeline.training.checkpoints.commit import CheckpointCommit
from pipeline.training.config import Lora
from pipeline.training.start.adapters import ADAPTER_DIRECTORY, adapter_pairs, merge, write_adapter
from pipeline.training.start.weights import PlainTensor


def export_merged(
    store: Store,
    commit: CheckpointCommit,
    directory: Path,
    *,
    start: StartingPoint,
    lora: Lora,
    tensors: Mapping[str, PlainTensor],
) -> int:
    """Write the merged model and its adapter into `directory`.

    Args:
        store: of the training's workspace.
        commit: the final checkpoint, which holds the adapters alone.
        directory: exists.
        start: the weights that were frozen.
        lora: how adapters count.
        tensors: of the plain model.

    Returns:
        Number of weights that an adapter changed.

    Raises:
        CheckpointError: a file is damaged, or an adapter changes no tensor of the plain model.
    """
    source = store.local_path(commit.key.prefix, names=[entry.path for entry in commit.files])
    trained = open_weights(str(source))
    adapters = {name: trained.read(name) for name in trained.shapes}
    pairs = adapter_pairs(adapters)
    strange = sorted(set(pairs) - set(tensors))
    if strange:
        raise CheckpointError(
            f"adapters change {', '.join(strange)}, which the plain model does not have; merging would lose them",
            hint="name other layers in `lora.targets`",
        )

    def read(name: str) -> Array:
        array = start.weights.read(tensors[name].stored_name)
        if name not in pairs:
            return array
        a, b = (adapters[each] for each in pairs[name])
        return merge(array, a=a, b=b, lora=lora)

    headers = {
        name: TensorHeader(name=name, shape=tensor.shape, dtype=start.weights.dtype_of(tensor.stored_name))
        for name, tensor in tensors.items()
    }
    write_sharded(directory, headers=headers, read=read)
    for name in (CONFIG_NAME, TOKENIZER_NAME, STATE_NAME):
        shutil.copyfile(source / name, directory / name)
    (directory / ADAPTER_DIRECTORY).mkdir(exist_ok=True)
    write_adapter(directory / ADAPTER_DIRECTORY, adapters, lora, base=start.place)
    return len(pairs)
