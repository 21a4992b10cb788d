from __future__ import annotations

from dataclasses import dataclass

from millstream.comments import field_comments


@dataclass
class _Settings:
    """A docstring # that is no comment."""

    beside: int = 1  # beside the field
    silent: str = "# not a comment"
    wrapped: str | None = None  # inside the brackets
    # above the field,
    # on two lines
    above: int = 2
    both: int = 3  # and beside


def test_comments_belong_to_their_fields() -> None:
    assert field_comments(_Settings) == {
        "beside": "beside the field",
        "wrapped": "inside the brackets",
        "above": "above the field, on two lines",
        "both": "and beside",
    }


def test_a_class_without_source_has_none() -> None:
    made: dict[str, type] = {}
    exec("class Made:\n    field: int = 1  # a comment nobody can read\n", made)
    assert field_comments(made["Made"]) == {}
