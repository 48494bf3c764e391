"""The words of a command line, put so that typer reads them as they are meant."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from infer.cli.extract import ANY

# Words that may stand behind -x with a space between. Others need --extract=LANG, or they would swallow the prompt.
_LANGUAGES = (
    "any awk bash bat c clojure cmake cpp c++ csharp c# css csv cuda dart diff dockerfile elixir erlang fish fortran "
    "fsharp go graphql groovy haskell hcl html ini java javascript js json jsonl jsx julia kotlin latex lua make "
    "makefile markdown md nix objc ocaml patch perl php powershell proto py python python3 r rb regex rs ruby rust "
    "scala scss sh shell sql svelte svg swift tcl tex text toml ts tsx typescript vim vue xml yaml yml zig zsh"
)
# What begins with a dash and is no option: a negative number, a list in Markdown, the head of a page.
_VALUE = re.compile(r"-(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|-inf|-+\s.*", re.DOTALL | re.IGNORECASE)


def values_last(arguments: Sequence[str], options: Mapping[str, bool]) -> list[str]:
    """The arguments, behind a `--` where one of them begins with a dash and is no option, such as -1.

    options: every spelling of an option, and whether a value follows it.
    """
    given: list[str] = []
    values: list[str] = []
    rest = list(arguments)
    while rest and (word := rest.pop(0)) != "--":
        if not word.startswith("-") or word == "-" or (word not in options and _VALUE.fullmatch(word)):
            values.append(word)
            continue
        given.append(word)
        if _takes_next(word, options) and rest:
            given.append(rest.pop(0))
    if not any(word.startswith("-") and word != "-" for word in values):
        return list(arguments)
    return [*given, "--", *values, *rest]


def _takes_next(word: str, options: Mapping[str, bool]) -> bool:
    if word.startswith("--"):
        return options.get(word, False)
    letters = [options.get(f"-{letter}", False) for letter in word[1:]]
    return True in letters and letters.index(True) == len(letters) - 1


def attach_language(arguments: Sequence[str], options: Mapping[str, bool]) -> list[str]:
    """The arguments with `-x LANG` and a bare `-x` as `--extract=LANG`, so that a parser whose options have always or
    never a value can read them.

    options: every spelling of an option, and whether a value follows it.
    """
    result: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        cluster = word[1:-1] if re.fullmatch(r"-[A-Za-z]*x", word) else None
        if word == "--":
            return [*result, word, *rest]
        if word == "--extract" or (
            cluster is not None and not any(options.get(f"-{letter}", True) for letter in cluster)
        ):
            language = rest.pop(0) if rest and rest[0].casefold() in _LANGUAGES.split() else ANY
            result += [*([f"-{cluster}"] if cluster else []), f"--extract={language}"]
            continue
        result.append(word)
        if options.get(word) and rest:
            result.append(rest.pop(0))
    return result
