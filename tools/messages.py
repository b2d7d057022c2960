"""Write every text that infeed shows to users into ``tests/messages.txt``, for review in one place.

    python tools/messages.py           # write the file
    python tools/messages.py --check   # fail if the file differs from the code

Texts are string literals and f-strings of at least two words that are not docstrings, assertions or markup, in the order of the
source. A line starts with how the text is used: the exception, ``warning``, ``log.info``, ``print``, or ``text`` for everything
else, such as labels and parts of longer texts. Expressions in f-strings are shortened to a name: ``{count}``.
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
# Functions whose texts are not messages: documentation of options, and names of types.
IGNORED = {"_option", "TypeVar", "NewType", "compile", "namedtuple"}
# At least two words, outside of placeholders.
WORDS = re.compile(r"[A-Za-z]{2,}['.,:;)]*\s+(?:\S*\s+)*?[('\"]*[A-Za-z]{2,}")
MARKUP = re.compile(r"</?[a-z]+[ >/]|[{;]\s*\w[\w-]*:\s*[^;]+;|=>|^import |^\s*from \w+ import|^def ", re.MULTILINE)


def placeholder(node: ast.expr) -> str:
    """Return a short name for an expression."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return node.attr
        case ast.Call():
            given = [placeholder(one) for one in node.args]
            return given[0] if given else placeholder(node.func)
        case ast.Subscript():
            return placeholder(node.value)
        case ast.IfExp():
            return f"{placeholder(node.body)}|{placeholder(node.orelse)}"
        case ast.Constant():
            return str(node.value)
        case ast.BinOp():
            return placeholder(node.left)
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


def messages_in(tree: ast.AST, use: str = "text") -> Iterator[tuple[int, str, str]]:
    """Yield line, use and text of the messages in a syntax tree."""
    if isinstance(tree, ast.expr):
        text = text_of(tree)
        if text is not None:
            if WORDS.search(re.sub(r"\{[^{}]*\}", "_", text)) and not MARKUP.search(text):
                yield tree.lineno, use, text
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
        is_docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
        if not is_docstring and not isinstance(child, ast.arg | ast.Assert | ast.FormattedValue):
            yield from messages_in(child, use if isinstance(child, ast.expr | ast.keyword | ast.comprehension) else "text")


def messages() -> str:
    """Return all messages, grouped by module."""
    blocks = []
    for path in sorted(SOURCE.rglob("*.py")):
        found = dict.fromkeys(messages_in(ast.parse(path.read_text(encoding="utf-8"))))
        if found:
            lines = [f"{use}: {' / '.join(text.split(chr(10))).strip()}" for _, use, text in found]
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
