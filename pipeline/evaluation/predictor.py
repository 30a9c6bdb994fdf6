"""What a model must do to be judged, whatever framework it is in.

Owns the seam between the comparison and the frameworks. The one decision: tokens and logits cross it as numpy arrays,
so the formulas exist once.

Shape suffixes: B rows, T positions, V vocabulary, P prompt tokens, N continued tokens.
"""

from typing import Any, Protocol

from numpy.typing import NDArray


class Predictor(Protocol):
    """A causal language model in float32."""

    def logits(self, tokens_BT: NDArray[Any]) -> NDArray[Any]:
        """float32 [B, T, V] of int32 [B, T]."""
        ...

    def continue_greedily(self, prompts_BP: NDArray[Any], *, num_tokens: int) -> NDArray[Any]:
        """int32 [B, N]: the most likely token, appended, `num_tokens` times; ends of text do not stop it."""
        ...
