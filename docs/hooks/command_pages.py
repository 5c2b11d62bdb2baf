"""A page for each command of ``tailrace``, made of its parser: its usage, arguments, options and defaults."""

from __future__ import annotations

import argparse
import html
import re
from collections.abc import Iterator

from tailrace.cli.main import COMMANDS, build_parser

_FOLDER = "reference/commands"
_WIDTH = 90
_FLAG = re.compile(r"(?<![\w-])--?[a-z][a-z-]*(?![\w=])")
_SPECIAL = re.compile(r"([\\*_{}\[\]()#+!|~^=])")
_QUOTED = re.compile(r"(`[^`]+`)")


def titles() -> dict[str, str]:
    """The pages and their titles, for the navigation."""
    return {
        f"{_FOLDER}/index.md": "All commands",
        **{f"{_FOLDER}/{name}.md": f"tailrace {name}" for name in COMMANDS},
    }


def pages() -> dict[str, str]:
    """The pages and their Markdown."""
    found = {f"{_FOLDER}/index.md": _index()}
    for name, parser in _subparsers(build_parser()):
        found[f"{_FOLDER}/{name}.md"] = "\n".join(_lines(parser, ""))
    return found


def _index() -> str:
    rows = [f"| [`tailrace {name}`]({name}.md) | {_prose(line)} |" for name, line in COMMANDS.items()]
    return "\n".join(
        [
            "# Commands",
            "",
            "These pages are made from the parsers of the command line: they say what `--help` says, and name every "
            "option. A connection URI may also be given as `@FILE`, or in the environment variable `TAILRACE_URI`.",
            "",
            "| command | what it does |",
            "|---|---|",
            *rows,
            "",
        ]
    )


def _subparsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _lines(parser: argparse.ArgumentParser, prefix: str) -> Iterator[str]:
    """The Markdown of a parser and of those below it. ``prefix`` begins the anchors of its options."""
    level = "##" if prefix else "#"
    yield from (f"{level} {parser.prog}", "")
    yield from ("```text", _usage(parser), "```", "")
    yield from _text(parser.description or "")
    for group in parser._action_groups:
        shown = [one for one in group._group_actions if one.help != argparse.SUPPRESS]
        shown = [one for one in shown if not isinstance(one, argparse._SubParsersAction)]
        if shown:
            yield from (f"{level}# {_title(group)} {{: #{prefix}{_slug(_title(group))} }}", "")
            for action in shown:
                yield from _definition(parser, action, prefix)
    yield from _text(parser.epilog or "")
    for name, part in _subparsers(parser):
        yield from _lines(part, f"{prefix}{name}")


def _title(group: argparse._ArgumentGroup) -> str:
    title = group.title or ""
    return "Arguments" if title == "positional arguments" else title.capitalize()


def _slug(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower()).strip("-")


def _formatter(parser: argparse.ArgumentParser) -> argparse.HelpFormatter:
    formatter = argparse.RawDescriptionHelpFormatter(parser.prog, width=_WIDTH)
    if hasattr(formatter, "_set_color"):  # Python 3.14 colours what a terminal shows
        formatter._set_color(False)
    return formatter


def _usage(parser: argparse.ArgumentParser) -> str:
    formatter = _formatter(parser)
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
    return formatter.format_help().strip().removeprefix("usage: ").replace("\n       ", "\n")


def _definition(parser: argparse.ArgumentParser, action: argparse.Action, prefix: str) -> Iterator[str]:
    arguments = _formatter(parser)._format_args(action, _metavar(action)) if action.nargs != 0 else ""
    arguments = "..." if action.metavar == "..." else arguments
    names = ", ".join(action.option_strings)
    shown = f"{names} {arguments}".strip()
    anchor = action.option_strings[-1] if action.option_strings else f"-{_slug(action.dest)}"
    yield f"`{shown}` {{: #{prefix}{anchor} }}"
    assert action.help, f"{parser.prog}: the help does not say what {shown} does"
    yield f":   {_help(parser, action)}"
    yield ""


def _metavar(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        return action.metavar
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.dest.upper() if action.option_strings else action.dest


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """The help of an argument. Where that is silent about its default, the default is added."""
    said = _formatter(parser)._expand_help(action) if action.help else ""
    silent = action.default is None or action.default is False or action.default in (argparse.SUPPRESS, "", [], ())
    if silent or "default" in said:
        return _prose(said)
    default = f"{action.default:g}" if isinstance(action.default, float) else action.default
    return f"{_prose(said)} (default: `{default}`)".strip()


def _text(text: str) -> Iterator[str]:
    """Paragraphs as prose; what is indented, as it stands."""
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        if not paragraph.strip():
            continue
        if re.search(r"(?m)^  ", paragraph):
            yield from ("```text", paragraph, "```", "")
        else:
            yield from (_prose(" ".join(paragraph.split())), "")


def _prose(text: str) -> str:
    """``text`` in Markdown: its signs are signs, and flags and quoted commands are code."""
    text = re.sub(r"(?<!\w)'(tailrace [^']+)'(?!\w)", r"`\1`", text)
    parts = []
    for part in _QUOTED.split(text):
        if _QUOTED.fullmatch(part):
            parts.append(part)
            continue
        end = 0
        for flag in _FLAG.finditer(part):
            parts += [_escaped(part[end : flag.start()]), f"`{flag[0]}`"]
            end = flag.end()
        parts.append(_escaped(part[end:]))
    return "".join(parts)


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", html.escape(text, quote=False))
