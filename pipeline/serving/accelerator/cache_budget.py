"""How many slots of how many tokens fit beside a model's weights.

Owns that arithmetic. Pure, without jax. The one decision: what a process may take is its own allocator's limit, never
what a device shows as free, which is other processes' business too; what the flow leaves open is derived from it, and
what it asks for is refused, with every term, where it does not fit.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.cluster.ledger import gib
from pipeline.errors import ParameterError

MOST_SLOTS = {"cpu": 8, "gpu": 64}
"""Of an open choice: beyond 8 rows a few cores decode hardly more tokens a second; 64 means three decode batches."""
FEW_SLOTS = 4
"""An open context is shortened before there are fewer of an open number of slots."""
SHORTEST_CONTEXT = 512
"""Of an open choice; a shorter one serves hardly anybody."""
CONTEXT_GRAIN = 256
"""An open context is a multiple of it, as attention lengths are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """What one process may take for one model."""

    limit: int
    """Bytes that this model may take."""
    source: str
    """Whose limit it is, for the message."""
    weights: int
    """Bytes of the parameters as they are served."""
    bytes_per_token: int
    """Of the key-value cache, for one position of one slot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheFit:
    """Slots and context that fit, and the arithmetic."""

    slots: int
    context: int
    cache: int
    temporaries: int | None
    """Of the largest executable; None where so much is left that it need not be known."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What a flow says of the cache; None leaves it open."""

    slots: int | None
    context: int | None
    longest_context: int
    """That the model can be served with."""
    most_slots: int
    multiple: int = 1
    """The number of slots divides by it."""


def fit_cache(wish: Wish, *, budget: Budget, temporaries: Callable[[int, int], int]) -> CacheFit:
    """The most that fits: the whole context first, then slots; of what is asked for, exactly that.

    Args:
        wish: what is asked for.
        budget: what there is.
        temporaries: bytes of the largest executable's temporaries for (slots, context); asked only where the cache
            takes more than half of what the weights leave, for it may have to compile.

    Raises:
        ParameterError: it does not fit.
    """
    taken: int | None = None
    while True:
        slots, context = _largest(wish, budget=budget, room=budget.limit - budget.weights - (taken or 0))
        cache = slots * context * budget.bytes_per_token
        left = budget.limit - budget.weights - cache
        if left >= cache and taken is None:
            return _fit(budget, slots=slots, context=context, temporaries=None)
        if left < 0:
            raise _refusal(wish, budget=budget, slots=slots, context=context, temporaries=taken)
        needed = temporaries(slots, context)
        if needed <= left:
            return _fit(budget, slots=slots, context=context, temporaries=needed)
        if taken is not None and needed <= taken:
            # The smallest that could be chosen was, and it does not fit.
            raise _refusal(wish, budget=budget, slots=slots, context=context, temporaries=needed)
        taken = needed


def _largest(wish: Wish, *, budget: Budget, room: int) -> tuple[int, int]:
    """Slots and context for so many bytes of cache; the smallest allowed ones where even they are too many."""
    tokens = max(0, room) // max(1, budget.bytes_per_token)
    least_slots = wish.slots or wish.multiple
    few = wish.slots or max(least_slots, min(FEW_SLOTS, wish.most_slots) // wish.multiple * wish.multiple)
    context = wish.context or _open_context(tokens // few, longest=wish.longest_context)
    if wish.slots is not None:
        return wish.slots, context
    fitting = min(tokens // context, wish.most_slots) // wish.multiple * wish.multiple
    return max(least_slots, fitting), context


def _open_context(tokens: int, *, longest: int) -> int:
    if tokens >= longest:
        return longest
    return max(min(SHORTEST_CONTEXT, longest), tokens // CONTEXT_GRAIN * CONTEXT_GRAIN)


def _fit(budget: Budget, *, slots: int, context: int, temporaries: int | None) -> CacheFit:
    cache = slots * context * budget.bytes_per_token
    return CacheFit(
        slots=slots,
        context=context,
        cache=cache,
        temporaries=temporaries,
        reason=_arithmetic(budget, slots=slots, context=context, temporaries=temporaries),
    )


def _arithmetic(budget: Budget, *, slots: int, context: int, temporaries: int | None) -> str:
    cache = slots * context * budget.bytes_per_token
    beside = "" if temporaries is None else f" + {gib(temporaries)} of temporaries of the largest executable"
    total = budget.weights + cache + (temporaries or 0)
    return (
        f"{gib(budget.weights)} of weights + {gib(cache)} of key-value cache ({slots} slots x {context} tokens x "
        f"{budget.bytes_per_token} bytes){beside} = {gib(total)} of {gib(budget.limit)} ({budget.source})"
    )


def _refusal(wish: Wish, *, budget: Budget, slots: int, context: int, temporaries: int | None) -> ParameterError:
    asked = [name for name, value in (("slots", wish.slots), ("max_context_tokens", wish.context)) if value is not None]
    least = "" if len(asked) == 2 else " at the least"
    lower = f"lower {' or '.join(asked)}, " if asked else ""
    return ParameterError(
        "the model does not fit: "
        + _arithmetic(budget, slots=slots, context=context, temporaries=temporaries).replace(" = ", f"{least} = ", 1),
        hint=f"{lower}use a smaller dtype (bfloat16, int8), a larger share (resources: gpus) or more memory",
    )
