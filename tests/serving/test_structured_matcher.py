"""Whatever tokens are drawn under its masks, a finished text is what the constraint says."""

import json
import re

import jsonschema
import numpy as np
import pytest
from tiny_llama import VOCABULARY

from pipeline.serving.engine.request import GrammarError
from pipeline.serving.grammar.response_format import Constraint
from pipeline.serving.grammar.structured_matcher import CompiledGrammar, GrammarFault
from pipeline.serving.grammar.vocabulary import Vocabulary

END = 0
MAX_TOKENS = 6000
SHORT = {"type": "string", "maxLength": 8}
SCHEMAS = [
    {"type": "object"},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "integer"},
    {"type": "integer", "minimum": -3, "exclusiveMaximum": 12},
    {"type": "number", "minimum": 0.5, "maximum": 2.25},
    {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 9},
    {"type": "null"},
    {"enum": ["red", 1, None, {"a": [True]}]},
    {"const": {"deep": ["é", "\n"]}},
    {"type": ["string", "null"], "maxLength": 4},
    {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 2}]},
    {"oneOf": [{"type": "boolean"}, {"type": "string", "maxLength": 2}]},
    {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 7}]},
    {"type": "object", "properties": {"a": SHORT}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "properties": {"a": SHORT, "b": {"type": "integer"}}, "additionalProperties": False},
    {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x", "y"], "additionalProperties": SHORT},
    {"type": "object", "patternProperties": {"^n_[a-z]{1,3}$": {"type": "integer"}}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1, "additionalProperties": False},
    {"type": "array", "prefixItems": [{"type": "integer"}, SHORT], "items": False, "minItems": 2},
    {"type": "string", "pattern": "^[A-Z][a-z]{2,4}-[0-9]+$", "maxLength": 12},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "email"},
    {"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}}},
    {"$defs": {"t": {"enum": [1, 2]}}, "type": "array", "items": {"$ref": "#/$defs/t"}, "minItems": 2, "maxItems": 3},
    {"type": "object", "properties": {"k": {"const": "a"}, "v": {"type": "integer"}}, "required": ["k", "v"]},
    {
        "anyOf": [
            {"type": "object", "properties": {"k": {"const": name}, name: kind}, "required": ["k", name]}
            for name, kind in (("circle", {"type": "number"}), ("box", {"type": "array", "items": {"type": "integer"}}))
        ]
    },
    {"type": "array", "items": {"type": "array", "items": {"type": "string", "maxLength": 1}, "maxItems": 2}},
    {"type": "object", "additionalProperties": {"type": "object", "additionalProperties": {"type": "boolean"}}},
]


def compiled(vocabulary, kind, text):
    made = Constraint(kind=kind, text=text if isinstance(text, str) else json.dumps(text), field="response_format")
    return CompiledGrammar(made, tokens=vocabulary.grammar_tokens)


def allowed(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def drawn(grammar, vocabulary, *, seed, closing=0.2):
    """Random tokens under the masks; often the allowed one that closes most, or the walk would take forever."""
    rng, matcher, tokens = np.random.default_rng(seed), grammar.start(), []
    closers = [vocabulary.token(character) for character in ("}", "]", '"')]
    while len(tokens) < MAX_TOKENS and not matcher.is_finished:
        choices = allowed(matcher.mask())
        wanted = [token for token in (END, *closers) if token in choices]
        token = int(wanted[0] if wanted and rng.random() < closing else rng.choice(choices))
        if token == END:
            break
        tokens.append(token)
        matcher.accept([token])
    else:
        assert matcher.is_finished, "the walk did not end"
    return vocabulary.decode(tokens)


@pytest.fixture(scope="module")
def words(tokenizer):
    made = Vocabulary(tokenizer, num_tokens=VOCABULARY, stop_ids=(END,))
    made.token = tokenizer.token_to_id
    return made


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_a_finished_text_is_valid_json_of_its_schema(words, schema):
    grammar = compiled(words, "json_schema", schema)
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    texts = [drawn(grammar, words, seed=seed) for seed in range(4)]
    for text in texts:
        checker.validate(json.loads(text))


def test_any_object_is_an_object(words):
    grammar = compiled(words, "json_object", "")
    assert all(isinstance(json.loads(drawn(grammar, words, seed=seed)), dict) for seed in range(8))


@pytest.mark.parametrize(
    "expression", ["[0-9]{3}-[a-f]+", "(yes|no)!?", "a*", "é{1,3}|🙂", r"\d{4}-\w{2}", r"a/b\n?", "a\nb"]
)
def test_a_text_under_an_expression_matches_it(words, expression):
    grammar = compiled(words, "regex", expression)
    for seed in range(6):
        assert re.fullmatch(expression, drawn(grammar, words, seed=seed))


def test_a_text_under_a_grammar_can_be_derived_from_it(words):
    grammar = compiled(words, "grammar", 'start: "(" start ")" | NUMBER\nNUMBER: /[0-9]{1,3}/')
    for seed in range(6):
        text = drawn(grammar, words, seed=seed)
        assert re.fullmatch(r"\(*[0-9]{1,3}\)*", text) and text.count("(") == text.count(")")


def test_completions_of_one_grammar_do_not_disturb_each_other(words):
    grammar = compiled(words, "regex", "ab|cd")
    first, second = grammar.start(), grammar.start()
    first.accept([words.token("a")])
    assert allowed(first.mask()).tolist() == [words.token("b")]
    assert words.token("c") in allowed(second.mask())
    second.accept([words.token("c"), words.token("d")])
    assert second.is_finished and not first.is_finished


def test_white_space_is_bounded(words):
    matcher = compiled(words, "json_schema", {"type": "array"}).start()
    matcher.accept([words.token("[")])
    space = words.token("Ġ")
    for _ in range(40):
        assert space in allowed(matcher.mask())
        matcher.accept([space])
    assert space not in allowed(matcher.mask())


def test_a_token_outside_the_grammar_is_an_error_of_the_completion(words):
    matcher = compiled(words, "regex", "ab").start()
    with pytest.raises(GrammarError):
        matcher.accept([words.token("z")])


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("json_schema", {"type": "objekt"}, "objekt"),
        ("json_schema", {"not": {"type": "string"}}, "not"),
        ("json_schema", {"type": "string", "minLength": 5, "maxLength": 2}, "minLength"),
        ("json_schema", "false", "false"),
        ("json_schema", {"$ref": "https://example.com/x"}, "example.com"),
        ("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "no text fits"),
        ("json_schema", {"type": "string", "pattern": "^(?=a)"}, "look-around"),
        ("regex", "[", "unclosed"),
        ("grammar", "start: missing", "missing"),
        ("grammar", 'start: "a" |||| (', "start"),
    ],
)
def test_what_is_wrong_with_a_constraint_is_said(words, kind, text, said):
    with pytest.raises(GrammarFault, match=re.escape(said)):
        compiled(words, kind, text)
