"""Reading a YAML file that a user has written: one document, of a size and a shape that a person writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tailrace.errors import UsageError

#: A pipeline of stages may be long; what is longer is some other file.
BYTES_MAX: Final = 1 << 20
#: Levels of mappings and lists; a document in MongoDB may have a hundred or so.
DEPTH_MAX: Final = 250
_NUL: Final = "\0"


def read_text(file: Path, what: str = "pipeline file") -> str:
    """The content of a file that may be the ``what``. Raises UsageError."""
    try:
        with file.open("rb") as opened:
            raw = opened.read(BYTES_MAX + 1)
        text = raw.decode("utf-8")
    except (OSError, ValueError) as error:  # ValueError: also a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"cannot read {file}: {'its name holds a NUL' if _NUL in str(file) else reason}") from None
    if len(raw) > BYTES_MAX:
        raise UsageError(f"{file} is longer than a {what} may be, {BYTES_MAX >> 20} MB")
    return text


def read_yaml(file: Path, what: str = "pipeline file") -> Any:
    """What the file holds. Raises UsageError for what is not YAML, for a key that is given twice, and for aliases."""
    text = read_text(file, what)
    import yaml  # noqa: PLC0415  of extras only

    try:
        _refuse_shapes(file, text)
        return yaml.load(text, Loader=_loader())
    except (RecursionError, ValueError, OverflowError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error).partition(";")[0]
        raise UsageError(f"{file} cannot be used: {reason}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise UsageError(f"{file} is not YAML{where}: {getattr(error, 'problem', None) or 'unreadable'}") from None


def _refuse_shapes(file: Path, text: str) -> None:
    """A few aliases stand for gigabytes, or for themselves. Each level of nesting makes every level below it dearer: a
    file of brackets would be read for hours."""
    import yaml  # noqa: PLC0415

    begins = (
        yaml.BlockMappingStartToken,
        yaml.BlockSequenceStartToken,
        yaml.FlowMappingStartToken,
        yaml.FlowSequenceStartToken,
    )
    ends = (yaml.BlockEndToken, yaml.FlowMappingEndToken, yaml.FlowSequenceEndToken)
    depth = 0
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        if isinstance(token, yaml.AliasToken):
            raise UsageError(
                f"{file} has the alias *{token.value} at {_place(token)}, but aliases are not supported",
                hint="Write its value out",
            )
        depth += isinstance(token, begins) - isinstance(token, ends)
        if depth > DEPTH_MAX:
            raise UsageError(f"{file} cannot be used: it is nested too deeply at {_place(token)}")


def _place(token: Any) -> str:
    return f"line {token.start_mark.line + 1}, column {token.start_mark.column + 1}"


def _loader() -> Any:
    """YAML's own rule, which PyYAML does not check: a key occurs once. Otherwise the last of two would win without a
    word."""
    import yaml  # noqa: PLC0415

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                    if key.value in seen:
                        raise yaml.constructor.ConstructorError(
                            None, None, f"the key '{key.value}' is given twice", key.start_mark
                        )
                    seen.add(key.value)
            return super().construct_mapping(node, deep)

    return Loader
