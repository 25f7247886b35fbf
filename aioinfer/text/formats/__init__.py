"""How families of models write thoughts and tool calls: one module for each way of writing calls,
on the incremental `reader` and `draft`. `registry` picks the one of a model."""
