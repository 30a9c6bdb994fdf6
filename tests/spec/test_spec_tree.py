import pytest

from pipeline.errors import SpecError
from pipeline.spec.tree import MAX_BYTES, MAX_DEPTH, ListNode, MapNode, ScalarNode, decode, parse, walk_scalars


def read(text):
    root, problems = parse(text, file="f.yaml")
    return root, [(problem.code, problem.position.line, problem.position.column) for problem in problems]


def only_problem(text):
    _, problems = parse(text, file="f.yaml")
    assert len(problems) == 1, problems
    return problems[0]


def test_scalars_keep_their_text_and_place():
    root, problems = read("a: 007\nb: 'x'\nc:\n  - 1e-5\n  - yes\n")
    assert problems == []
    assert isinstance(root, MapNode)
    a, b, c = (entry.value for entry in root.entries)
    assert isinstance(a, ScalarNode) and a.text == "007" and a.plain
    assert (a.position.line, a.position.column) == (1, 4)
    assert isinstance(b, ScalarNode) and not b.plain
    assert isinstance(c, ListNode)
    assert [(path, node.text) for path, node in walk_scalars(root, path="r")] == [
        ("r.a", "007"),
        ("r.b", "x"),
        ("r.c.0", "1e-5"),
        ("r.c.1", "yes"),
    ]


def test_an_absent_value_stands_behind_its_key():
    root, _ = read("a:\n\n\nb: 1\n")
    assert isinstance(root, MapNode)
    position = root.entries[0].value.position
    assert (position.line, position.column) == (1, 2)


def test_block_text_is_text():
    root, _ = read("a: |\n  5\n")
    assert isinstance(root, MapNode)
    node = root.get("a")
    assert isinstance(node, ScalarNode) and node.text == "5\n" and not node.plain


def test_duplicate_keys_name_the_first():
    problem = only_problem("a: 1\nb: 2\na: 3\n")
    assert problem.code == "duplicate-key"
    assert (problem.position.line, problem.position.column) == (3, 1)
    assert "first in line 1" in problem.found


@pytest.mark.parametrize(
    ("text", "code", "line", "column"),
    [
        ("a: &x 1\n", "no-anchor", 1, 4),
        ("a: *x\n", "no-alias", 1, 4),
        ("a:\n  <<: {b: 1}\n", "no-merge-key", 2, 3),
        ("a: !!str 5\n", "no-tag", 1, 4),
        ("a: !mine {b: 1}\n", "no-tag", 1, 4),
        ("? [a]\n: 1\n", "wrong-key", 1, 3),
        (": 1\n", "wrong-key", 1, 1),
        ("a: 1\n---\nb: 2\n", "several-documents", 2, 1),
        ("%YAML 1.1\n---\na: 1\n", "yaml-version", 2, 1),
        ("a:\n\tb: 1\n", "yaml-syntax", 2, 1),
        ("a: b: c\n", "yaml-syntax", 1, 5),
        ('a: "x\n', "yaml-syntax", 2, 1),
        ("a: [1, 2\n", "yaml-syntax", 2, 1),
        ("a: \x00\n", "yaml-syntax", 1, 4),
        ('a: "\\UFFFFFFFF"\n', "yaml-syntax", 1, 1),
        ("", "empty-file", 1, 1),
        ("# only a comment\n", "empty-file", 1, 1),
        ("[" * 200, "too-deep", 1, MAX_DEPTH + 1),
    ],
)
def test_what_a_flow_may_not_hold(text, code, line, column):
    _, problems = read(text)
    assert problems[0][0] == code
    assert problems[0][1:] == (line, column)


def test_several_complaints_come_together():
    _, problems = read("a: &x 1\nb: *x\nb: 2\nc: !!int 3\n")
    assert [code for code, _, _ in problems] == ["no-anchor", "no-alias", "duplicate-key", "no-tag"]


def test_tabs_are_explained():
    assert "spaces" in only_problem("a:\n\tb: 1\n").hint


def test_an_alias_bomb_is_not_expanded():
    lines = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    root, problems = parse("\n".join(lines), file="f.yaml")
    assert root is not None
    assert {problem.code for problem in problems} == {"no-anchor", "no-alias"}


def test_other_encodings_are_refused_where_they_start():
    with pytest.raises(SpecError) as caught:
        decode("a: 1\nb: ä\n".encode("latin-1"), file="f.yaml")
    (problem,) = caught.value.problems
    assert problem.code == "not-utf-8"
    assert (problem.position.line, problem.position.column) == (2, 4)


def test_a_byte_order_mark_is_no_text():
    assert decode(b"\xef\xbb\xbfa: 1\n", file="f.yaml") == "a: 1\n"


def test_huge_files_are_not_parsed():
    with pytest.raises(SpecError, match="at most"):
        decode(b"#" * (MAX_BYTES + 1), file="f.yaml")
