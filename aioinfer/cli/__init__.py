"""The command line: `commands` lists the subcommands, and a module of its name has each."""
