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
    """A causal language model of transformers: `model(input_ids).logits` and `model.generate`."""

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
        ids = self._ids(prompts_BP)
        continued = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            use_cache=True,
        )
        return continued[:, ids.shape[1] :].cpu().numpy().astype(np.int32)

    def _ids(self, tokens: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(tokens.astype(np.int64)).to(self._device)
