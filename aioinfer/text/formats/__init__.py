"""Message formats of model families, for reasoning and tool calls: one module for each tool-call
format, on the incremental `reader` and `draft`. `registry` picks the format of a model."""
