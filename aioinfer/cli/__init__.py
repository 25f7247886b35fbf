"""The subcommands of the command line: `serve`, `batch`, `chat`, `bench`, `completion`.

`python -m aioinfer --config FILE` without a subcommand is in `__main__`, and stays as it is.
"""
