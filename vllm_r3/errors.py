"""The one error that is meant for a user's eyes.

`cli.main` catches R3Error, prints it to stderr and exits 1. Any other exception is a bug and keeps
its traceback. Imports nothing, so that every module of the package may import it.
"""


class R3Error(Exception):
    """Something a user can act on.

    The message holds four things: where, what was expected, what was found, what to do.
    """
