"""Write every text that infeed shows to users into ``tests/messages.txt``, for review in one place.

    python tools/messages.py           # write the file
    python tools/messages.py --check   # fail if the file differs from the code

Texts are string literals and f-strings of at least two words that are not docstrings, assertions, comparisons or code, in the
order of the source, each once per module. A line starts with how the text is used: the exception, ``warning``, ``log.info``,
``print``, ``label`` for the keys of tables and codes of texts, or ``text`` for everything else, such as parts of longer texts.
Expressions in f-strings are shortened to a name: ``{count}``.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "infeed"
SNAPSHOT = ROOT / "tests" / "messages.txt"
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
# Functions whose texts are not messages: documentation of options, names of types, filters.
IGNORED = {"_option", "TypeVar", "NewType", "compile", "namedtuple", "filterwarnings"}
# Methods whose arguments are not messages, but patterns in other texts.
SEARCHING = {"startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition", "split", "replace", "search"}
OF_TEXT = {"capitalize", "lower", "splitlines", "strip", "upper"}
# Keys of tables that are not for users: of charts and of trace events.
OF_CHARTS = {"args", "hovermode", "hovertemplate", "text", "ticksuffix", "xref"}
# Types whose values are words of messages.
WORD_TYPES = {"State"}
# At least two words, outside of placeholders.
WORDS = re.compile(r"[A-Za-z]{2,}['.,:;)]*\s+(?:\S*\s+)*?[('\"]*[A-Za-z]{2,}")
TAG = re.compile(r"</?[a-z][^<>]*>")
CODE = re.compile(
    r"[{;]\s*\w[\w-]*:\s*[^;]+;|=>|^import |^\s*from \w+ import|^def |^PRAGMA |^SELECT |^default-src |^<!DOCTYPE"
    r"|^/dev/|__\w+__ __\w+__",  # paths, and lists of methods
    re.MULTILINE,
)


def placeholder(node: ast.expr) -> str:
    """Return a short name for an expression."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) if not name.startswith("__"):
            return name.strip("_")
        case ast.Attribute():
            return "type"
        case ast.Call():
            # The first argument names the value, except in calls such as min(1.0, share).
            of_text = [node.func.value] if isinstance(node.func, ast.Attribute) and node.func.attr in OF_TEXT else []
            return placeholder(next(one for one in (*node.args, *of_text, node.func) if not isinstance(one, ast.Constant)))
        case ast.Subscript(slice=ast.Constant(value=str(key))):
            return key
        case ast.Subscript() | ast.Starred():
            return placeholder(node.value)
        case ast.IfExp():
            return f"{placeholder(node.body)}|{placeholder(node.orelse)}"
        case ast.Constant():
            return str(node.value)
        case ast.BinOp():
            return placeholder(node.right if isinstance(node.left, ast.Constant) else node.left)
        case ast.UnaryOp():
            return placeholder(node.operand)
        case ast.BoolOp():
            return placeholder(node.values[0])
        case ast.Compare():
            return placeholder(node.left)
        case ast.GeneratorExp() | ast.ListComp():
            return placeholder(node.generators[0].iter)
        case ast.List() | ast.Tuple() if node.elts:
            return placeholder(node.elts[0])
        case ast.JoinedStr():
            return (text_of(node) or "").replace("{", "").replace("}", "").strip()
    return "..."


def text_of(node: ast.expr) -> str | None:
    """Return the text of a literal, an f-string or a sum of them; ``None`` for any other expression."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr():
            parts = [
                str(one.value) if isinstance(one, ast.Constant) else f"{{{placeholder(one.value)}}}"
                for one in node.values
                if isinstance(one, ast.Constant | ast.FormattedValue)
            ]
            return "".join(parts)
        case ast.BinOp(op=ast.Add()):
            left, right = text_of(node.left), text_of(node.right)
            if left is None and right is None:
                return None
            return "".join(
                f"{{{placeholder(one)}}}" if text is None else text for one, text in ((node.left, left), (node.right, right))
            )
    return None


def use_of(call: ast.Call) -> str | None:
    """Return how the arguments of a call are used; ``None`` if they are not messages."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in IGNORED:
        return None
    if name.endswith("Error") or name in ("KeyboardInterrupt", "SystemExit", "StopIteration"):
        return name
    if name == "warn":
        return "warning"
    if name in LEVELS and isinstance(call.func, ast.Attribute):
        return f"log.{name}"
    return "print" if name in ("print", "write") else "text"


def is_message(text: str) -> bool:
    """Whether a text has at least two words that are neither placeholders nor code."""
    words = re.sub(r"\{[^{}]*\}", "_", TAG.sub(" ", text))
    return bool(WORDS.search(words)) and not CODE.search(text)


def labels_in(tree: ast.AST) -> Iterator[str]:
    """Yield the words of one node that users see although they are not sentences."""
    match tree:
        case ast.Dict(values=values) if any(
            isinstance(value, ast.JoinedStr | ast.Constant | ast.BinOp) and " " in (text_of(value) or "") for value in values
        ):
            keys = [key.value for key in tree.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
            yield from () if OF_CHARTS.intersection(keys) else keys
        case ast.Assign(targets=[ast.Subscript(slice=ast.Constant(value=str(key)))], value=value):
            yield from [key] if any(isinstance(part, ast.JoinedStr) for part in ast.walk(value)) else []
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.Subscript(slice=ast.Tuple(elts=values))) if name in WORD_TYPES:
            yield from (str(value.value) for value in values if isinstance(value, ast.Constant))
        case ast.IfExp(body=ast.Constant(value=str(one)), orelse=ast.Constant(value=str(other))):
            yield from (word for word in (one, other) if re.fullmatch(r"\S*[A-Z]\S*[a-z]\S*", word))


def messages_in(tree: ast.AST, use: str = "text") -> Iterator[tuple[int, str, str]]:
    """Yield line, use and text of the messages in a syntax tree."""
    for label in labels_in(tree):
        yield getattr(tree, "lineno", 0), "label", label
    if isinstance(tree, ast.expr):
        text = text_of(tree)
        if text is not None:
            if is_message(text):
                yield tree.lineno, use, TAG.sub(" ", text)
            for part in ast.walk(tree):  # texts inside placeholders
                if isinstance(part, ast.FormattedValue):
                    yield from messages_in(part.value, use)
            return
    if isinstance(tree, ast.Call):
        within = use_of(tree)
        if within is None:
            return
        use = use if within == "text" else within
    for child in ast.iter_child_nodes(tree):
        if not is_skipped(child, tree):
            yield from messages_in(child, use if isinstance(child, ast.expr | ast.keyword | ast.comprehension) else "text")


def is_skipped(child: ast.AST, parent: ast.AST) -> bool:
    """Whether a part of a node holds no messages."""
    match parent:
        case ast.Compare() | ast.Subscript():
            return isinstance(child, ast.Constant)
        case ast.Call(func=ast.Attribute(value=ast.Constant(), attr="split")):
            return True
        case ast.Call(func=ast.Attribute(attr=name)) if name in SEARCHING:
            return child is not parent.func
        case ast.Assign(targets=[ast.Attribute(attr="__doc__")]) | ast.keyword(arg="loc"):
            return True
    is_docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
    return is_docstring or isinstance(child, ast.arg | ast.Assert | ast.FormattedValue)


def messages() -> str:
    """Return all messages, grouped by module."""
    blocks = []
    for path in sorted(SOURCE.rglob("*.py")):
        found = messages_in(ast.parse(path.read_text(encoding="utf-8")))
        lines = dict.fromkeys(f"{use}: {' / '.join(text.split(chr(10))).strip()}" for _, use, text in found)
        if lines:
            blocks.append("\n".join([f"# {path.relative_to(SOURCE.parent).as_posix()}", *lines]))
    return "\n\n".join(blocks) + "\n"


def main() -> int:
    text = messages()
    if "--check" in sys.argv:
        return int(not SNAPSHOT.exists() or SNAPSHOT.read_text(encoding="utf-8") != text)
    SNAPSHOT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
