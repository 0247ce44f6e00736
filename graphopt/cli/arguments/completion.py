"""``graphopt completion``: scripts that complete commands, options and their values in bash, zsh and fish."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping

__all__ = ["SHELLS", "completion_script", "words_of"]

SHELLS = ("bash", "zsh", "fish")

_BASH = """\
# graphopt completion for bash: source it, or put it into a folder of bash-completion
_graphopt() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} words=
    if [ "$COMP_CWORD" -eq 1 ]; then
        words={commands}
    else
        case "${{COMP_WORDS[1]}} $previous" in
{values}
        *) case "${{COMP_WORDS[1]}}" in
{options}
            esac ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _graphopt graphopt
"""

_ZSH = "#compdef graphopt\n# graphopt completion for zsh: source it\nautoload -U +X bashcompinit && bashcompinit\n"


def words_of(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """The options of a command, each with the values that it can have, where these are known."""
    found: dict[str, list[str]] = {}
    for action in parser._actions:
        for option in action.option_strings:
            found[option] = [str(choice) for choice in action.choices or ()]
    return found


def _positional_words(parser: argparse.ArgumentParser) -> list[str]:
    """The words that can stand without an option."""
    return [str(c) for action in parser._actions if not action.option_strings for c in action.choices or ()]


def completion_script(shell: str, commands: Mapping[str, argparse.ArgumentParser]) -> str:
    """The script of a shell.

    Args:
        shell: one of ``SHELLS``.
        commands: the parsers of all commands, by their names.
    """
    if shell == "fish":
        return "\n".join(_fish(commands)) + "\n"
    values = [
        f"        {shlex.quote(f'{name} {option}')}) words={shlex.quote(' '.join(choices))} ;;"
        for name, parser in commands.items()
        for option, choices in words_of(parser).items()
        if choices
    ]
    options = [
        f"            {name}) words={shlex.quote(' '.join([*words_of(parser), *_positional_words(parser)]))} ;;"
        for name, parser in commands.items()
    ]
    script = _BASH.format(
        commands=shlex.quote(" ".join(commands)), values="\n".join(values), options="\n".join(options)
    )
    return f"{_ZSH}{script}" if shell == "zsh" else script


def _fish(commands: Mapping[str, argparse.ArgumentParser]) -> Iterator[str]:
    yield "# graphopt completion for fish: put it into ~/.config/fish/completions/graphopt.fish"
    yield f"complete -c graphopt -n __fish_use_subcommand -a {shlex.quote(' '.join(commands))}"
    for name, parser in commands.items():
        seen = f"'__fish_seen_subcommand_from {name}'"
        if words := _positional_words(parser):
            yield f"complete -c graphopt -n {seen} -a {shlex.quote(' '.join(words))}"
        for option, choices in words_of(parser).items():
            kind = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            more = f" -x -a {shlex.quote(' '.join(choices))}" if choices else ""
            yield f"complete -c graphopt -n {seen} {kind}{more}"
