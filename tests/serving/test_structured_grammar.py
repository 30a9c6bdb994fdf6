"""Bombs are stopped in time, in a process that can be ended, and never twice."""

import asyncio
import json
import time

import pytest

from pipeline.serving.grammar.response_format import Constraint
from pipeline.serving.grammar.structured_grammar import GrammarCompiler
from pipeline.serving.grammar.structured_limits import MAX_CHARACTERS, MAX_DEPTH, why_too_large
from pipeline.serving.grammar.structured_matcher import GrammarFault
from pipeline.serving.grammar.structured_trial import CompilerUnavailable

DEADLINE_SECONDS = 0.7
# Beside the deadline: a process is ended and another answers; 1.5 s measured on two busy cores.
REACTION_SECONDS = 20


def constraint(kind, text):
    return Constraint(kind=kind, text=text if isinstance(text, str) else json.dumps(text), field="response_format")


def nested_one_of(levels):
    schema = {"type": "string"}
    for _ in range(levels):
        schema = {
            "oneOf": [schema, {"type": "object", "properties": {"a": schema}}, {"type": "array", "items": schema}]
        }
    return schema


def reference_tree(levels, *, keyword, width):
    parts = {f"d{level}": {keyword: [{"$ref": f"#/$defs/d{level + 1}"}] * width} for level in range(levels)}
    return {"$ref": "#/$defs/d0", "$defs": {**parts, f"d{levels}": {"type": "string"}}}


def deep(levels):
    schema = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def alternatives_of_alternatives(number):
    def part(name):
        return {
            "anyOf": [{"properties": {f"{name}{i}": {"type": "string"}}, "required": [f"{name}{i}"]} for i in range(10)]
        }

    return {"allOf": [part(f"p{index}") for index in range(number)]}


# Each of these is compiled for more than 20 s by llguidance 1.9 with its own limits in place.
ENDLESS = {
    "divisors": ("json_schema", {"allOf": [{"type": "integer", "multipleOf": p} for p in (9973, 9967, 9949, 9941)]}),
    "intersected expressions": (
        "json_schema",
        {"allOf": [{"type": "string", "pattern": f".*[a-z]{{1,{50 + i}}}x.{{{i}}}"} for i in range(20)]},
    ),
}
REFUSED = {
    "large nested oneOf": ("json_schema", nested_one_of(9), "characters"),
    "small nested oneOf": ("json_schema", nested_one_of(6), "exclude each other"),
    "depth": ("json_schema", deep(150), "levels deep"),
    "alternatives of alternatives": ("json_schema", alternatives_of_alternatives(8), "too large"),
    "long expression": ("regex", "(abc|def)*" * 20000, "characters"),
    "nested expression": ("regex", "(" * 1500 + "a" + ")*" * 1200, "regex"),
    "complement": ("grammar", "start: A\nA: /(.*a.{10}z)/ & /(.*b.{11}z)/ & ~/(.*c.{12}z)/", "fuel"),
}
HARMLESS = {
    "references, each twice": ("json_schema", reference_tree(60, keyword="allOf", width=2)),
    "length": ("json_schema", {"type": "string", "maxLength": 10**9}),
    "repetition": ("regex", "((a{1,100}){1,100}){1,100}"),
    "backtracking": ("regex", "(x+x+)+y"),
    "ambiguity": ("grammar", 'start: s\ns: s s | "a" | "b"'),
}


@pytest.fixture(scope="module")
def compiler(vocabulary):
    made = GrammarCompiler(vocabulary, deadline_seconds=DEADLINE_SECONDS)
    yield made
    made.close()


def compiled(compiler, kind, text):
    return asyncio.run(compiler.compile(constraint(kind, text)))


@pytest.mark.parametrize("name", ENDLESS)
def test_what_does_not_end_is_ended_and_the_next_is_compiled(compiler, name):
    started = time.monotonic()
    with pytest.raises(GrammarFault, match=r"takes more than 0\.7 s"):
        compiled(compiler, *ENDLESS[name])
    assert time.monotonic() - started < REACTION_SECONDS
    started = time.monotonic()
    with pytest.raises(GrammarFault, match="takes more than"):  # what is known is not tried again
        compiled(compiler, *ENDLESS[name])
    assert time.monotonic() - started < DEADLINE_SECONDS / 2
    assert compiled(compiler, "regex", f"[a-z]{{{len(name)}}}").start().mask().any()


@pytest.mark.parametrize("name", REFUSED)
def test_a_bomb_is_refused_with_its_reason(compiler, name):
    kind, text, said = REFUSED[name]
    with pytest.raises(GrammarFault, match=said):
        compiled(compiler, kind, text)


@pytest.mark.parametrize("name", HARMLESS)
def test_what_looks_like_a_bomb_and_is_none_compiles(compiler, name):
    assert compiled(compiler, *HARMLESS[name]).start().mask().any()


def test_the_same_constraint_is_compiled_once(compiler):
    first = compiled(compiler, "json_schema", {"type": "integer"})
    assert compiled(compiler, "json_schema", {"type": "integer"}) is first


def test_only_so_many_are_kept(vocabulary):
    compiler = GrammarCompiler(vocabulary, max_kept=2)
    first = compiled(compiler, "regex", "a")
    for expression in ("b", "c"):
        compiled(compiler, "regex", expression)
    assert compiled(compiler, "regex", "a") is not first
    compiler.close()


def test_who_waits_too_long_behind_others_is_told(vocabulary):
    compiler = GrammarCompiler(vocabulary, deadline_seconds=2.0, wait_seconds=0.2)

    async def both():
        bomb = asyncio.create_task(compiler.compile(constraint(*ENDLESS["divisors"])))
        await asyncio.sleep(0.05)
        with pytest.raises(CompilerUnavailable, match="other grammars"):
            await compiler.compile(constraint("regex", "a"))
        await asyncio.gather(bomb, return_exceptions=True)

    asyncio.run(both())
    compiler.close()


def test_a_schema_at_the_limits_is_no_fault():
    assert why_too_large(constraint("json_schema", deep(MAX_DEPTH // 2 - 1))) is None
    assert "levels deep" in why_too_large(constraint("json_schema", deep(MAX_DEPTH)))
    assert why_too_large(constraint("regex", "a" * MAX_CHARACTERS["regex"])) is None
    assert why_too_large(constraint("regex", "a" * (MAX_CHARACTERS["regex"] + 1))) is not None


def test_brackets_inside_texts_are_no_depth():
    assert why_too_large(constraint("json_schema", {"const": '[{"' * 500})) is None
