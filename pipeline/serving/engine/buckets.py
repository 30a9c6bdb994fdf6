"""The few shapes an executable is compiled for.

Owns the bucket sets. Pure. The one decision: the set is small and closed; a request is padded up to a bucket, and a
shape outside the set is a programming error, never a compile.
"""

from collections.abc import Sequence
from dataclasses import dataclass

SMALLEST_ATTENTION = 256
"""A smaller one would spare a short request 0.06 ms a layer and cost every start three more compiles."""
SMALLEST_CHUNK = 16
IDLE_CHUNKS = 4
"""Chunks in one where nothing decodes. SmolLM2-135M, 512 tokens on two cores: 772 ms as 2 x 256, 785 ms as one, 886 ms
as 4 x 128, 1,062 ms as 8 x 64."""
DOUBLING_ATTENTION = 1024
"""Up to here attention lengths of prefill double, beyond they quadruple: 512 tokens take 785 ms over 512 positions and
951 ms over 1,024, and each length costs every start as many compiles as there are chunks."""

FEW_ADJUSTED = 1024
LONG_CONTEXT = 16384
"""Beyond it, lists of as many tokens as the context has (12 bytes each, a row) are too long to move at every step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Buckets:
    """Shapes of decode and prefill (each by attention length), of passes that do both, and of copied prefixes."""

    decode_batches: tuple[int, ...]
    decode_attention: tuple[int, ...]
    chunks: tuple[int, ...]
    """The last may be larger than the chunk between two decode steps: where nothing decodes, nobody waits for it."""
    prefill_attention: tuple[int, ...]
    adjusted: tuple[int, ...] = ()
    """Numbers of tokens whose logits change in a row, below the most there can be, which is always there."""
    copies: tuple[int, ...] = ()
    """Lengths of prefixes that are copied from slot to slot; none where no prefix is reused."""
    shared: tuple[int, ...] = ()
    """Tokens of a pass that extends prompts and decodes at once, in place of chunks. Each attends as a row of its own,
    so it is for attention in place alone."""
    computes_padding: bool = False
    """What fills up a shared pass costs as much as a token: experts compute it."""

    @classmethod
    def for_limits(
        cls,
        *,
        slots: int,
        context: int,
        chunk_tokens: int,
        smallest_attention: int = SMALLEST_ATTENTION,
        copies_prefixes: bool = False,
        is_deterministic: bool = False,
        reads_in_place: bool = False,
        has_experts: bool = False,
    ) -> "Buckets":
        """The sets for a server of these limits.

        One request decodes alone in a batch of 1: XLA:CPU reads weights at 27 GB/s for one row, at 13 GB/s for 4 to 16.
        Attention lengths double for decode, where they cost time at every token, and for short prompts.

        A deterministic server has one shape of each: a sum over 8 rows or 512 positions is rounded differently in an
        executable for 1 row or 256 positions, but a row of one executable does not depend on the other rows.

        Where attention reads the cache in place (`pipeline.models.packed.attention`), its length is what a sequence has
        and one executable does for all: 10 in place of 23 for a context of 1,024. What fills up a pass costs little
        there, so prompts and decoding share passes of few sizes; of more where experts compute it.
        """
        if is_deterministic:
            return cls(
                decode_batches=(slots,),
                decode_attention=(context,),
                chunks=(chunk_tokens,),
                prefill_attention=(context,),
                copies=(context,) if copies_prefixes else (),
            )
        smallest = min(smallest_attention, context)
        turn = min(max(smallest, DOUBLING_ATTENTION), context)
        prefill_attention = (*steps(smallest, turn, factor=2), *steps(turn, context, factor=4)[1:])
        chunks = steps(min(SMALLEST_CHUNK, chunk_tokens), chunk_tokens, factor=2)
        idle_chunk = IDLE_CHUNKS * chunk_tokens
        if idle_chunk <= smallest:
            chunks = (*chunks, idle_chunk)
        return cls(
            decode_batches=steps(1, slots, factor=8),
            decode_attention=(context,) if reads_in_place else steps(smallest, context, factor=2),
            chunks=() if reads_in_place else chunks,
            prefill_attention=() if reads_in_place else prefill_attention,
            shared=tuple(size + slots for size in _shared(chunks, chunk_tokens, has_experts)) if reads_in_place else (),
            computes_padding=has_experts,
            adjusted=(FEW_ADJUSTED,) if context > LONG_CONTEXT else (),
            copies=prefill_attention if copies_prefixes else (),
        )

    @property
    def choices(self) -> tuple[int, ...]:
        """Batches of logits from which tokens are chosen: of a prompt's last chunk, of decode and of shared passes."""
        return tuple(sorted({1, *self.decode_batches}))

    @property
    def num_executables(self) -> int:
        """How many executables warm-up compiles."""
        num_decode = len(self.decode_batches) * len(self.decode_attention)
        num_prefill = len(self.chunks) * len(self.prefill_attention)
        num_choose = len(self.choices) * (1 + len(self.adjusted))
        return num_decode + num_prefill + len(self.shared) + len(self.copies) + num_choose


def _shared(chunks: Sequence[int], chunk_tokens: int, has_experts: bool) -> list[int]:
    return sorted({*chunks} if has_experts else {chunks[0], chunk_tokens, chunks[-1]})


def smallest_fit(needed: int, sizes: Sequence[int]) -> int:
    """The smallest of the ascending `sizes` that holds `needed`.

    Raises:
        ValueError: none does.
    """
    for size in sizes:
        if size >= needed:
            return size
    raise ValueError(f"{needed} does not fit into any bucket of {tuple(sizes)}")


def steps(first: int, last: int, *, factor: int) -> tuple[int, ...]:
    """`first`, each `factor` times the one before, and `last`."""
    sizes = []
    size = first
    while size < last:
        sizes.append(size)
        size *= factor
    return (*sizes, last)
