"""A settings field's help is the comment beside it: read here from the source, so that it is written once."""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import tokenize


def field_comments(kind: type) -> dict[str, str]:
    """Field name -> the comments on its lines, or on the lines right above it, joined.

    Fields without one are left out; all are where the source is not at hand.
    """
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):
        return {}
    comments = _comments_by_line(source)
    body = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)).body
    lines = source.splitlines()
    found = {}
    for node in body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        first, last = node.lineno, node.end_lineno or node.lineno
        while lines[first - 2].lstrip().startswith("#"):  # whole-line comments above belong to the field below
            first -= 1
        parts = [comments[line] for line in range(first, last + 1) if line in comments]
        if parts:
            found[node.target.id] = " ".join(parts)
    return found


def _comments_by_line(source: str) -> dict[int, str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.string.lstrip("# ").rstrip() for token in tokens if token.type == tokenize.COMMENT}
