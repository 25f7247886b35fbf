"""Drafts from recorded texts, spoiled so that a given part of them is kept: `benchlib.recording`
writes the file that they are read from."""

#: The environment variable with the path of the file.
FILE_VARIABLE = "AIOINFER_BENCH_RECORDING"
#: The first tokens of a text, by which a request's text is found.
KEY_TOKENS = 4
