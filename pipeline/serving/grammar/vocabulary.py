"""What the tokens of a model stand for: text of many, bytes of one, and the form in which a grammar wants them.

Owns the tokenizer of a running replica. Knows nothing of requests. The one decision: llguidance reads the tokenizer's
own file format, so grammars, log-probabilities and text agree about every byte. A tokenizer that it cannot read
(neither byte-level nor with byte tokens) still makes text; `why_no_grammar` then says why it constrains none.
"""

from collections.abc import Sequence
from typing import Any

from llguidance import LLTokenizer
from tokenizers import Tokenizer

_NEVER_IN_UTF8 = b"\xff"
"""What llguidance marks special tokens with; it takes the token of this byte for one."""


class Vocabulary:
    """Tokens of one model; for any thread."""

    def __init__(self, tokenizer: Tokenizer, *, num_tokens: int, stop_ids: Sequence[int]) -> None:
        """Takes 0.4 s for 49,000 tokens.

        Args:
            tokenizer: of the model directory.
            num_tokens: rows of the model's head; there may be more than the tokenizer has tokens.
            stop_ids: end-of-text tokens, which a grammar allows where it may end; the tokenizer's own where empty.
        """
        self.num_tokens = num_tokens
        self.grammar_tokens: LLTokenizer | None = None
        self.why_no_grammar = ""
        self._tokenizer = tokenizer
        self._added = frozenset(tokenizer.get_added_tokens_decoder())
        self._ends = [token for token in stop_ids if token < num_tokens] or None
        try:
            self.grammar_tokens = LLTokenizer(tokenizer.to_str(), n_vocab=num_tokens, eos_token=self._ends)
        except ValueError as error:
            self.why_no_grammar = f"this model's tokenizer cannot be constrained: {error}"

    def grammar_file(self) -> dict[str, Any]:
        """What another process makes the same `grammar_tokens` from; plain JSON."""
        return {"tokenizer": self._tokenizer.to_str(), "num_tokens": self.num_tokens, "ends": self._ends}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens that stand together."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def spelled(self, token: int) -> tuple[str, bytes]:
        """One token alone: its text, with replacement characters for bytes that are no whole character, and its bytes.

        A special token has its name as text and no bytes; a token that the tokenizer lacks has neither.
        """
        known = self.grammar_tokens
        if known is None:
            text = self.decode([token], skip_special_tokens=False)
            return text, text.encode()
        if known.is_special_token(token):
            name = self._tokenizer.id_to_token(token)
            if name is None or token in self._added:
                return name or "", b""
            return _NEVER_IN_UTF8.decode(errors="replace"), _NEVER_IN_UTF8
        encoded = bytes(known.decode_bytes([token]))
        return encoded.decode(errors="replace"), encoded
