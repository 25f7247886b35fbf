"""`aioinfer completion SHELL`: a script that completes the command line, made from the parser.

source <(aioinfer completion bash)            # in ~/.bashrc; zsh likewise
aioinfer completion fish | source
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from aioinfer.config import describe_keys

_BASH = """\
_aioinfer() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} options
    case $previous in
        --set) compopt -o nospace; COMPREPLY=($(compgen -S = -W "{keys}" -- "$word")); return;;
    esac
    if (( COMP_CWORD == 1 )); then
        COMPREPLY=($(compgen -W "{commands}" -- "$word")); return
    fi
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
    if [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$word"))
    else
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}}
complete -o filenames -F _aioinfer aioinfer
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("shell", choices=["bash", "zsh", "fish"])


def run(options: argparse.Namespace) -> int:
    """Prints the script."""
    from aioinfer.cli.commands import make_parser, write

    parser = make_parser()
    if options.shell == "fish":
        write("".join(f"{line}\n" for line in _fish(parser)))
        return 0
    first = "autoload -U +X bashcompinit && bashcompinit\n" if options.shell == "zsh" else ""
    write(first + _bash(parser))
    return 0


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (action,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def _bash(parser: argparse.ArgumentParser) -> str:
    commands = _commands(parser)
    cases = []
    for name, command in commands.items():
        words = " ".join(word for action in command._actions for word in action.option_strings)
        cases.append(f'        {name}) options="{words}";;')
    keys = " ".join(dotted for dotted, *_ in describe_keys())
    return _BASH.format(commands=" ".join(commands), cases="\n".join(cases), keys=keys)


def _fish(parser: argparse.ArgumentParser) -> Iterator[str]:
    for name, command in _commands(parser).items():
        doc = _quoted(command.description)
        yield f"complete -c aioinfer -n __fish_use_subcommand -a {name} -d {doc}"
        for action in command._actions:
            words = " ".join(
                f"-l {o[2:]}" if o.startswith("--") else f"-s {o[1:]}"
                for o in action.option_strings
            )
            if words:
                yield (
                    f"complete -c aioinfer -n '__fish_seen_subcommand_from {name}' {words} "
                    f"-d {_quoted(action.help)}"
                )


def _quoted(text: str | None) -> str:
    return "'" + (text or "").replace("\\", "\\\\").replace("'", "\\'") + "'"
