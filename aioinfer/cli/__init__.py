"""The subcommands of the command line: `commands` lists them, and a module of its name has each.

`python -m aioinfer --config FILE` without a subcommand is in `__main__`.
"""
