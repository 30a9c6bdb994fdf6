"""A compiled grammar, and where one completion stands in it.

Owns every call of llguidance's matcher. Knows nothing of processes, deadlines or HTTP. The one decision: a compiled
grammar is never advanced; each completion advances a copy, which shares what llguidance has learned about the grammar.

Shape suffixes: W 32-bit words of a mask over the vocabulary.
"""

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

from pipeline.serving.engine.request import GrammarError
from pipeline.serving.grammar.response_format import Constraint

MAX_LEXER_STATES = 50_000
"""Of one grammar, 1 to 2 kB each; a fifth of llguidance's default, because many grammars are kept."""
_WHITESPACE = r"[\x20\x0A\x0D\x09]{0,40}"
"""Between the tokens of JSON. JSON has no limit, and small models have no sense of when to stop."""
_ANY_OBJECT = '{"type": "object"}'


class GrammarFault(Exception):  # noqa: N818 - of what a client wrote
    """The constraint cannot be compiled; says why."""


class CompiledGrammar:
    """A constraint over one vocabulary; for any thread."""

    def __init__(self, constraint: Constraint, *, tokens: LLTokenizer) -> None:
        """Compile.

        Raises:
            GrammarFault: the constraint is wrong, unsatisfiable, or has what is not supported.
        """
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        self._matcher = LLMatcher(tokens, _source(constraint), log_level=0, limits=limits)
        self._num_words = -(-tokens.vocab_size // 32)
        self._first_W = _mask(self._matcher, num_words=self._num_words, failure=GrammarFault)

    def start(self) -> "Matcher":
        """A matcher before the first token."""
        return Matcher(self._matcher.deep_copy(), first_W=self._first_W)  # a copy takes 2 microseconds


class Matcher:
    """Of one completion."""

    def __init__(self, matcher: LLMatcher, *, first_W: np.ndarray) -> None:
        self._matcher = matcher
        self._mask_W: np.ndarray | None = first_W
        self._num_words = len(first_W)

    @property
    def is_finished(self) -> bool:
        """True where nothing but an end of text can follow."""
        return bool(self._matcher.is_stopped())

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance by generated tokens.

        Raises:
            GrammarError: they do not fit, or the grammar is too costly to follow.
        """
        if tokens and not self._matcher.consume_tokens(list(tokens)):
            raise GrammarError(_said(self._matcher))
        self._mask_W = None if tokens else self._mask_W

    def mask(self) -> np.ndarray:
        """The tokens that may come next; uint32 [W], token t at bit t % 32 of word t // 32.

        Raises:
            GrammarError: the grammar is too costly to follow, or has no way on.
        """
        if self._mask_W is None:
            self._mask_W = _mask(self._matcher, num_words=self._num_words, failure=GrammarError)
        return self._mask_W


def _source(constraint: Constraint) -> str:
    if constraint.kind == "regex":
        # As in a schema's `pattern`, \d and \w are ASCII; to llguidance's own reader they are all of Unicode.
        expression = regex_to_lark(constraint.text, use_ascii="dw")
        return str(LLMatcher.grammar_from_lark(f"start: /{expression}/"))
    if constraint.kind == "grammar":
        return str(LLMatcher.grammar_from_lark(constraint.text))
    schema = _ANY_OBJECT if constraint.kind == "json_object" else constraint.text
    if schema in ("true", "false"):  # options need an object to stand in
        schema = f'{{"allOf": [{schema}]}}'
    try:
        return str(LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _WHITESPACE}))
    except ValueError as error:
        raise GrammarFault(str(error)) from error


def _mask(matcher: LLMatcher, *, num_words: int, failure: type[GrammarFault] | type[GrammarError]) -> np.ndarray:
    if not matcher.is_error():
        mask_W = np.frombuffer(matcher.compute_bitmask(), np.uint32)[:num_words]  # it has a word to spare
        if not matcher.is_error() and mask_W.any():
            return mask_W
    raise failure(_said(matcher))


def _said(matcher: LLMatcher) -> str:
    text = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
    if "coerce_one_of" in text:  # an option of llguidance's, which would accept what the schema does not
        return "oneOf is only supported where its alternatives exclude each other; use anyOf"
    return "no text fits it" if text in ("", "NoExtension", "NoExtensionBias") else text
