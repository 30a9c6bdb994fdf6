"""What one row of a model's inputs looks like.

Owns the way from a model's description to the forms that a replica compiles and judges requests by. Knows nothing of
HTTP. The one decision: beside the number of rows every size is fixed when a model is deployed; a size that the model
leaves open is given by name, because padding it would change what the model computes.

Shape suffixes: B batch.
"""

from collections.abc import Mapping

from pipeline.errors import ParameterError, nearest_name
from pipeline.models.description import ModelDescription
from pipeline.models.encoder_inputs import FREE_IMAGE_SIZE
from pipeline.models.traced.description import TracedModel
from pipeline.serving.engine.forward_executor import InputForm

USUAL_IMAGE_SIZE = 224
"""Height and width where a model takes any."""
_IMAGE_AXES = ("channels", "height", "width")
_EXAMPLE_SEED = 0
_SENT_AS = {"bfloat16": "float32"}
"""Of a dtype that neither JSON nor numpy's files can hold; the compiled function casts floats to its own."""


def row_forms(description: ModelDescription, *, dimensions: Mapping[str, int]) -> dict[str, InputForm]:
    """Shape and dtype of one row of every input.

    Args:
        description: of the model.
        dimensions: sizes by name, for those that the model leaves open.

    Raises:
        ParameterError: an input has no batch axis or is complex, an open size is not given, or a given size is none of
            the model's; lists everything.
    """
    shapes = _traced(description) if isinstance(description, TracedModel) else _family(description)
    complaints: list[str] = []
    batches = {shape[0] if shape else None for shape, _ in shapes.values()}
    batch = next(iter(batches)) if len(batches) == 1 else None
    if not isinstance(batch, str):
        shown = ", ".join(f"{name} {list(shape)}" for name, (shape, _) in shapes.items())
        complaints.append(f"the inputs do not share an open first axis, so rows cannot be batched: {shown}")
    names = {size for shape, _ in shapes.values() for size in shape[1:] if isinstance(size, str)}
    free = {} if isinstance(description, TracedModel) else dict.fromkeys(names, USUAL_IMAGE_SIZE)
    missing = sorted(names - dimensions.keys() - free.keys())
    complaints += [f"the size {name!r} is open; give it in `dimensions`" for name in missing]
    for name in sorted(dimensions.keys() - names):
        guess = nearest_name(name, tuple(names))
        complaints.append(
            f"dimensions: the model has no open size {name!r}; it has: {', '.join(sorted(names)) or 'none'}"
            + (f"; did you mean {guess!r}?" if guess else "")
        )
    if batch in names:
        complaints.append(f"an axis beside the first has the batch's size {batch!r}")
    complaints += [
        f"the input {name!r} is {dtype}; served are floats, whole numbers and booleans"
        for name, (_, dtype) in shapes.items()
        if dtype.startswith("complex")
    ]
    if complaints:
        raise ParameterError(f"{description.name}: " + "; ".join(complaints))
    sizes = {**free, **dimensions}
    return {
        name: InputForm(
            shape=tuple(sizes[size] if isinstance(size, str) else size for size in shape[1:]),
            dtype=_SENT_AS.get(dtype, dtype),
        )
        for name, (shape, dtype) in shapes.items()
    }


def _traced(description: TracedModel) -> dict[str, tuple[tuple[int | str, ...], str]]:
    return {name: (spec.shape, spec.dtype) for name, spec in description.program.inputs.items()}


def _family(description: ModelDescription) -> dict[str, tuple[tuple[int | str, ...], str]]:
    shapes = {}
    for name, array in description.example_inputs(seed=_EXAMPLE_SEED).items():
        sizes: tuple[int | str, ...] = array.shape[1:]
        if array.ndim == 1 + len(_IMAGE_AXES) and array.shape[2:] == FREE_IMAGE_SIZE:
            sizes = (array.shape[1], *_IMAGE_AXES[1:])
        shapes[name] = (("batch", *sizes), array.dtype.name)
    return shapes
