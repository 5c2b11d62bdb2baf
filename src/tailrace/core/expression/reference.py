"""The reference of the expression language, made from the registry: what is supported, since when, what is refused.

python -m tailrace.core.expression.reference > docs/reference/expressions.md
"""

from __future__ import annotations

from itertools import groupby

import tailrace.core.expression  # noqa: F401  fills the registry
from tailrace.core.expression.language.registry import LISTED, OPERATORS, REFUSED, Listed

_INTRODUCTION = """\
# The expression language

What a change stream's pipeline may contain in Tailrace, and since which server version MongoDB has it. This page is
generated from the code: `python -m tailrace.core.expression.reference > docs/reference/expressions.md`.

A stream speaks the language of its server's version, or of the one that you name (`server_version`). Under a version
before the one in the table, an operator, a stage or a variable is answered as that server answers it, such as
`Unrecognized expression '$firstN'` (168) on 4.4. The meaning is that of mongod 6.0.27, and from 7.0 on that of 7.0.28:
the same bytes come out, and the same error codes. `tests/differential` compares both on random stages and documents
(`make fuzz-expressions SEED=n N=n`, `ARGS="--server-version 7.0.28"`), and recorded answers of 4.4.2, 5.0.4, 6.0.27 and
7.0.28 are compared everywhere. What a later version than 7.0 may have added is refused by name, since it was not
measured. The copy at the start of a stream (`start="snapshot"`) and `lake erase` speak the language of 6.0.

What cannot be evaluated exactly is refused by name, with the server's code if the server refuses it too, and with 115
(CommandNotSupported) if it does not; `engine="server"` gives it. It is refused when the stream is opened or, if only a
value decides, on the event that holds the value.
"""

_COMPILED = """\
## In compiled code

A `$match` is evaluated in compiled code wherever that can be exact: comparisons of all types, `$in`, `$exists`,
`$type`, `$size`, `$mod`, `$all`, `$elemMatch`, the bitwise operators, logic, paths through arrays, regular expressions
that are a text, or the beginning or the end of one (`abc`, `^a\\.b`, `abc$`; no option `i` or `x`), and `$expr` of
comparisons, `$and`, `$or`, `$not`, `$in`, `$cond`, `$ifNull`, paths and constants. Everything else, and every `$match`
under a collation, is evaluated in plain Python, with the same result; only such events take longer.

`$project`, `$set`, `$addFields` and `$unset`, and `$replaceRoot` and `$replaceWith` by a path or a document, are
written in compiled code too: literals, paths, and documents and arrays of these. Any other expression in them is
evaluated in plain Python, on paths that are looked up in compiled code. What comes after a `$redact`, after a `$match`
that is not compiled, or after a stage of more than 60 names at one level, is evaluated in plain Python, and only for
events that get there.
"""

_KNOWN = """\
## What 7.0 does differently

* Regular expressions are PCRE2's (10.40) instead of PCRE's: `(?n)`, `(?^)`, `(?xx)`, `(*NUL)`, `(*pla:..)`, script
  runs, loosely named properties and Unicode 14; `[a-\\d]` and unknown escapes are errors. A search gives up at the same
  point.
* A constant time zone, unit, first day of the week or bin size is read when the stream is opened: a bad one fails then
  (40485, 9, 5439016, 5439018), whatever the date is. `$dateTrunc`, `$dateDiff`, `$dateAdd` and `$dateSubtract` read
  their arguments in a different order, and an unknown unit is 9 instead of 5439014.
* `$set` and `$addFields` take an empty object as a value (before: 40180). What is set inside it takes precedence.
* An array loses what a projection takes out of it for good: later stages do not count it.
* `$add` and `$multiply` keep the order of their arguments: only constants at the beginning are put together.
* `$match` sees a field without a name, and takes an `$expr` that is always true for `$alwaysTrue`.
* `$percentile` with NaN as a share ends mongod 7.0.28; here it is refused. `$$USER_ROLES` is refused.

## Known limits

* Collations other than the simple one need the extra `icu`; without it they are refused when the stream is opened. The
  order is that of the installed ICU, which for a few strings is not mongod's ([how few](differences.md#collations)).
* Decimal arguments of logarithms, powers, exponentials and trigonometry are refused on the event. The server turns them
  into binary numbers of 113 bits, computes there with a library of its own and converts the result back. Of 400 random
  arguments each, its last digit was not that of the exact result in 9 % (`$acos`) to 42 % (`$tan`), and a model of that
  arithmetic was still wrong for 0.8 % (`$atan`, `$tanh`, at tiny arguments) to 58 %. Addition, multiplication,
  division, remainder, square root, rounding, and degrees and radians are exact.
* `$dateFromString` and `$toDate` read what the server's version reads. Texts that move a date by weekdays ("next
  monday", "5 weekdays", "next week"), `back of` and `front of` are refused on the event. 4.4 and 5.0 read some
  notations differently, or find no date in them. For their servers these are refused by name: an hour alone ("T05"), an
  offset with seconds ("+013000"), a day of the year after a hyphen ("2020-366"), negative fractions of a timestamp; and
  for 4.4 years with a sign and five or more digits, `first day of` and `last day of`, and fractions of a second of more
  than seven digits.
* Named time zones are followed from 1902 to 2036; outside these years they are refused on the event. Offsets and UTC
  have no bounds. The rules come from Python's database, and mongod 6.0.27 has an older one (Egypt's summer time of
  2023).
* Before 6.0, `$add` of a wrong type is 16554 and we say 14; on 4.4 so are `$multiply` (16555), `$subtract` (16556,
  16613) and `$divide` (16609; by zero 16608, and we say 2).
* Before 6.0, `$add` and `$subtract` write different trailing zeros of decimals, `$mod` by a decimal zero is 16610, and
  `$toDate` refuses timestamps. 4.4 also differs in `$subtract` of a long that overflows, in codes of `$multiply` and
  `$substr`, and in `$meta`. 7.0 does not look at the options of `$regexFind`, `$regexFindAll` and `$regexMatch` where
  the pattern is null. `tests/golden/test_operators.py` counts these.
* A mongod for Windows has another C library: the last digit of its logarithms, powers, exponentials and trigonometry,
  and the sign of a computed NaN, may differ. So may the order in which `$sortArray` leaves equal elements of a long
  array. It reads texts of doubles below 2.2E-308, which the servers for Linux refuse, and offsets in minutes (`%Z`)
  beyond 32 bits in its own way. Here 7.0 reads as the servers for Linux do.
* From 7.0 on, also refused by name: `(*LIMIT_HEAP=n)`, `(?(VERSION..)`, a callout with a text, and inside a lookbehind
  a back reference; and a quantile that is zero of more than 16 numbers with zeros of both signs.
* Before 7.0 regular expressions are read as the server's PCRE 8.42 reads them. Refused by name when the stream opens:
  `\\C`, `\\K` inside a look-around, `(?X)`, `\\p{Lu}` and its like in a class without regard to case, `(*SKIP:name)`
  inside a look-around, and inside a lookbehind a call of a group that is open or comes later, and `\\R` or `\\X` with a
  number. When a search gives up is described under [limits](differences.md#regular-expressions).
* `$zip` with a default that is missing is refused on the event. Where a projection takes scalars out of an array, a
  server before 7.0 keeps invisible elements that a later stage still counts; an expression that reads such an array is
  refused.
* `$sortArray` by a path that meets an array is refused on the event.
* The options of a stage that is forbidden in a stream are checked as on the server: their names, their types, and
  which are required. Errors that the server finds deeper inside such a stage (a negative `maxDepth`, an unknown window
  function) are code 20 here, as for the stage itself.
* Where two constant parts of one projection fail, the server reports either; here it is the first.
"""


def reference() -> str:
    """The page as Markdown."""
    rows = [*LISTED, *(Listed(each.name, each.group, each.since, each.note) for each in OPERATORS.values())]
    parts = [_INTRODUCTION]
    ordered = sorted(rows, key=lambda row: row.group)
    for group, members in groupby(ordered, key=lambda row: row.group):
        lines = [f"| `{row.name}` | {row.since} | {row.note} |" for row in sorted(members, key=lambda row: row.name)]
        parts.append(
            f"## {group[0].upper()}{group[1:]}\n\n| name | since | |\n|---|---|---|\n" + "\n".join(lines) + "\n"
        )
    refused = [f"| `{each.name}` | {each.code} | {each.reason} |" for _, each in sorted(REFUSED.items())]
    parts.append("## Refused\n\n| name | code | why |\n|---|---|---|\n" + "\n".join(refused) + "\n")
    return "\n".join([*parts, _COMPILED, _KNOWN])


if __name__ == "__main__":
    print(reference(), end="")
