"""The aggregation operators by group. Importing this package fills the registry."""

from tailrace.expression.operators import (
    accumulate,
    arithmetic,
    array,
    convert,
    date_math,
    date_text,
    dates,
    iterate,
    logic,
    numeric,
    objects,
    refused,
    regex,
    sets,
    text,
    variables,
)

__all__ = [
    "accumulate",
    "arithmetic",
    "array",
    "convert",
    "date_math",
    "date_text",
    "dates",
    "iterate",
    "logic",
    "numeric",
    "objects",
    "refused",
    "regex",
    "sets",
    "text",
    "variables",
]
