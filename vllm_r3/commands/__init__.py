"""One module per command.

Each exposes `add_parser(subparsers)`, which adds its parser and sets `func`, a callable from the
parsed arguments to the exit status. A command module parses arguments and calls a function that
takes plain values; heavy imports belong inside that function.
"""
