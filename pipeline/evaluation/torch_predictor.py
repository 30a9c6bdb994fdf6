"""A torch causal language model, judged.

Owns the torch side of the predictor seam. Knows nothing of checkpoints or of Flax. The one decision: continuation goes
through the model's own key-value cache, the way torch users run it, while Flax re-reads the whole text; agreement then
also speaks for both ways of decoding.

Shape suffixes: B rows, T positions, V vocabulary, P prompt tokens, N continued tokens.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class TorchPredictor:
    """A transformers-style module: `model(input_ids, use_cache=...)` gives `.logits` and `.past_key_values`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model.eval()
        self._device = next(model.parameters()).device

    @torch.inference_mode()
    def logits(self, tokens_BT: NDArray[Any]) -> NDArray[Any]:
        """float32 [B, T, V] of int32 [B, T]."""
        return self._model(self._ids(tokens_BT), use_cache=False).logits.float().cpu().numpy()

    @torch.inference_mode()
    def continue_greedily(self, prompts_BP: NDArray[Any], *, num_tokens: int) -> NDArray[Any]:
        """int32 [B, N]; see `Predictor`."""
        step_ids, cache, chosen = self._ids(prompts_BP), None, []
        for _ in range(num_tokens):
            output = self._model(step_ids, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            step_ids = output.logits[:, -1].argmax(dim=-1, keepdim=True)
            chosen.append(step_ids.cpu().numpy())
        return np.concatenate(chosen, axis=1).astype(np.int32)

    def _ids(self, tokens: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(tokens.astype(np.int64)).to(self._device)
