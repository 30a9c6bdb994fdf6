"""YAML text to a tree of nodes that know their place and keep their source text.

Owns reading YAML: syntax errors, duplicate keys, and the refusal of what a flow has no use for (anchors, aliases, tags,
several documents). Knows nothing of flows. The one decision: a scalar stays text here; what it means is decided
later by the type that the schema gives it, never by how it looks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)
from ruamel.yaml.reader import ReaderError

from pipeline.errors import Position, Problem, SpecError

MAX_BYTES = 1 << 18
"""A flow is written by hand; the parser needs up to 4 s for this much."""
MAX_DEPTH = 32
"""A flow nests six deep; the limit keeps recursion over the tree bounded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalarNode:
    """A value as it was written. `plain` is False where the text was quoted or is a block."""

    text: str
    plain: bool
    position: Position


@dataclass(frozen=True, kw_only=True, slots=True)
class ListNode:
    """A sequence."""

    items: tuple["Node", ...]
    position: Position


@dataclass(frozen=True, kw_only=True, slots=True)
class MapNode:
    """A mapping, keys unique and in file order."""

    entries: tuple["Entry", ...]
    position: Position

    def get(self, name: str) -> "Node | None":
        """The value of a key."""
        return next((entry.value for entry in self.entries if entry.name == name), None)

    @property
    def names(self) -> tuple[str, ...]:
        """The keys in file order."""
        return tuple(entry.name for entry in self.entries)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One key and its value."""

    name: str
    position: Position
    """Of the key."""
    value: "Node"


Node = ScalarNode | ListNode | MapNode


def walk_scalars(node: Node, *, path: str) -> Iterator[tuple[str, ScalarNode]]:
    """Every scalar below `node` with its dotted path, in file order."""
    match node:
        case ScalarNode():
            yield path, node
        case ListNode():
            for index, item in enumerate(node.items):
                yield from walk_scalars(item, path=f"{path}.{index}")
        case MapNode():
            for entry in node.entries:
                yield from walk_scalars(entry.value, path=f"{path}.{entry.name}")


def positions_of(node: Node, *, path: str) -> Iterator[tuple[str, Position]]:
    """The dotted path and the position of `node` and of everything below it."""
    yield path, node.position
    match node:
        case ListNode():
            for index, item in enumerate(node.items):
                yield from positions_of(item, path=f"{path}.{index}")
        case MapNode():
            for entry in node.entries:
                yield from positions_of(entry.value, path=f"{path}.{entry.name}")
        case ScalarNode():
            pass


def decode(data: bytes, *, file: str) -> str:
    """Bytes of a file as text.

    Raises:
        SpecError: it is too large, or not UTF-8; the position is the first bad byte's.
    """
    start = Position(file=file, line=1, column=1)
    if len(data) > MAX_BYTES:
        found = f"the file has {len(data)} bytes; a flow has at most {MAX_BYTES}"
        raise SpecError([Problem(position=start, path="", code="file-too-large", found=found)])
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line = before.count(b"\n") + 1
        column = error.start - (before.rfind(b"\n") + 1) + 1
        position = Position(file=file, line=line, column=column)
        found = f"byte 0x{data[error.start]:02x} is not UTF-8"
        problem = Problem(
            position=position, path="", code="not-utf-8", found=found, hint="save the file with the encoding UTF-8"
        )
        raise SpecError([problem]) from error


def parse(text: str, *, file: str) -> tuple[Node | None, list[Problem]]:
    """The tree of a YAML text, and what is wrong with it.

    Problems that leave the tree readable (a duplicate key, an anchor) are returned beside it; after a syntax error the
    tree is None. An empty text has no tree and is a problem too.
    """
    builder = _Builder(file=file)
    yaml = YAML(typ="safe", pure=True)
    try:
        for event in yaml.parse(text):
            if not builder.take(event):
                break
    except MarkedYAMLError as error:
        builder.fail(_syntax_problem(error, text=text, file=file))
    except ReaderError as error:
        position = _position_of_offset(text, error.position, file=file)
        found = f"the character U+{ord(text[error.position]):04X} is not allowed in YAML"
        builder.fail(Problem(position=position, path="", code="yaml-syntax", found=found))
    except (YAMLError, ValueError, OverflowError) as error:
        # An escape such as "\UFFFFFFFF" reaches chr() unchecked in the scanner; it has no mark.
        found = f"the YAML cannot be read: {error}"
        builder.fail(Problem(position=builder.last, path="", code="yaml-syntax", found=found))
    if builder.root is None and not builder.problems:
        found = "the file is empty"
        builder.fail(Problem(position=builder.start, path="", code="empty-file", found=found))
    return builder.root, builder.problems


def _position_of_offset(text: str, offset: int, *, file: str) -> Position:
    before = text[:offset]
    return Position(file=file, line=before.count("\n") + 1, column=offset - (before.rfind("\n") + 1) + 1)


def _syntax_problem(error: MarkedYAMLError, *, text: str, file: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
    said = " ".join(part for part in (error.context, error.problem) if part)
    lines = text.splitlines()
    here = lines[line - 1] if line <= len(lines) else ""
    hint = ""
    if "\t" in here[: len(here) - len(here.lstrip())]:
        said, hint = "a tab indents this line", "YAML indents with spaces"
    elif "mapping values are not allowed" in said:
        hint = "quote a value that holds a colon and a space"
    return Problem(
        position=Position(file=file, line=line, column=column), path="", code="yaml-syntax", found=said, hint=hint
    )


@dataclass(kw_only=True, slots=True)
class _Frame:
    """A collection that is being read."""

    position: Position
    path: str
    is_map: bool
    items: list[Node] = field(default_factory=list)
    entries: dict[str, Entry] = field(default_factory=dict)
    key: ScalarNode | None = None
    """The key that waits for its value."""
    key_end: Position | None = None
    skipped: bool = False
    """The waiting key cannot be used; its value is read and dropped."""


class _Builder:
    """Turns parser events into nodes without recursion."""

    def __init__(self, *, file: str) -> None:
        self.root: Node | None = None
        self.problems: list[Problem] = []
        self.start = self.last = Position(file=file, line=1, column=1)
        self._file = file
        self._stack: list[_Frame] = []
        self._num_documents = 0

    def fail(self, problem: Problem) -> None:
        """The rest of the text cannot be used."""
        self.root = None
        self.problems.append(problem)

    def _problem(self, code: str, found: str, *, position: Position | None = None, hint: str = "") -> None:
        path = self._path()
        self.problems.append(Problem(position=position or self.last, path=path, code=code, found=found, hint=hint))

    def _path(self) -> str:
        if not self._stack:
            return ""
        frame = self._stack[-1]
        part = (frame.key.text if frame.key else "") if frame.is_map else str(len(frame.items))
        return ".".join(piece for piece in (frame.path, part) if piece)

    def take(self, event: Any) -> bool:
        """Use one event; False where reading on makes no sense."""
        mark = event.start_mark
        self.last = Position(file=self._file, line=mark.line + 1, column=mark.column + 1)
        match event:
            case DocumentStartEvent():
                return self._document(event)
            case AliasEvent():
                hint = "write the value out, or declare it under params and refer to it as ${params.NAME}"
                self._problem("no-alias", f"the alias *{event.anchor} is not used in flows", hint=hint)
                self._place(ScalarNode(text="", plain=True, position=self.last), event)
            case ScalarEvent():
                self._refuse_decorations(event)
                plain = event.style is None
                self._place(ScalarNode(text=event.value, plain=plain, position=self.last), event)
            case MappingStartEvent() | SequenceStartEvent():
                return self._open(event)
            case MappingEndEvent() | SequenceEndEvent():
                self._close(event)
            case _:
                pass
        return True

    def _document(self, event: DocumentStartEvent) -> bool:
        self._num_documents += 1
        if event.version not in (None, (1, 2)):
            version = ".".join(str(part) for part in event.version)
            self._problem("yaml-version", f"the file says YAML {version}; flows are YAML 1.2")
        if self._num_documents > 1:
            self._problem("several-documents", "a second document starts here", hint="a file holds one flow")
            return False
        return True

    def _refuse_decorations(self, event: Any) -> None:
        if event.anchor is not None:
            self._problem("no-anchor", f"the anchor &{event.anchor} is not used in flows")
        if event.tag is not None:
            hint = "remove it; the type comes from the schema"
            self._problem("no-tag", f"the tag {event.tag} is not used in flows", hint=hint)

    def _open(self, event: Any) -> bool:
        self._refuse_decorations(event)
        if len(self._stack) >= MAX_DEPTH:
            self.fail(
                Problem(
                    position=self.last,
                    path="",
                    code="too-deep",
                    found=f"more than {MAX_DEPTH} levels are nested here",
                )
            )
            return False
        is_map = isinstance(event, MappingStartEvent)
        self._stack.append(_Frame(position=self.last, path=self._path(), is_map=is_map))
        return True

    def _close(self, event: Any) -> None:
        frame = self._stack.pop()
        if frame.is_map:
            node: Node = MapNode(entries=tuple(frame.entries.values()), position=frame.position)
        else:
            node = ListNode(items=tuple(frame.items), position=frame.position)
        self._place(node, event)

    def _place(self, node: Node, event: Any) -> None:
        """Put a finished node where it belongs."""
        if not self._stack:
            self.root = node
            return
        frame = self._stack[-1]
        if not frame.is_map:
            frame.items.append(node)
        elif frame.key is None and not frame.skipped:
            self._take_key(frame, node, event)
        else:
            self._take_value(frame, node)

    def _take_key(self, frame: _Frame, node: Node, event: Any) -> None:
        end = event.end_mark
        frame.key_end = Position(file=self._file, line=end.line + 1, column=end.column + 1)
        if not isinstance(node, ScalarNode):
            self._problem("wrong-key", "a key must be a name", position=node.position)
        elif node.text == "":
            self._problem("wrong-key", "a key is empty", position=node.position)
        elif node.text == "<<" and node.plain:
            self._problem("no-merge-key", "the merge key << is not used in flows", hint="write the keys out")
        elif node.text in frame.entries:
            first = frame.entries[node.text].position
            frame.key = node
            self._problem("duplicate-key", f"the key {node.text!r} is here twice; first in line {first.line}")
        else:
            frame.key = node
            return
        frame.key, frame.skipped = None, True

    def _take_value(self, frame: _Frame, node: Node) -> None:
        key, frame.key = frame.key, None
        if frame.skipped or key is None:
            frame.skipped = False
            return
        if isinstance(node, ScalarNode) and node.plain and not node.text and frame.key_end is not None:
            # The parser puts an absent value where the next token starts, which is another line.
            node = ScalarNode(text="", plain=True, position=frame.key_end)
        frame.entries[key.text] = Entry(name=key.text, position=key.position, value=node)
