"""A user's reward file looked at without running it: a login node needn't have what it imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def problem(file: Path, function: str) -> str | None:
    """What keeps `function` from being in `file`, as far as its text tells; None where nothing does."""
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except OSError as error:
        return f"can't be read ({error.strerror})"
    except (SyntaxError, ValueError) as error:
        return f"is no Python: {error}"
    names = set(_names(tree))
    if function in names or "*" in names:
        return None
    functions = sorted(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return f"has no function {function!r}; choose {', '.join(functions) or 'a file that has one'}"


def _names(tree: ast.Module) -> Iterator[str]:
    """All names that are bound anywhere in it, in branches and `try` too; `*` for what an import hides."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
