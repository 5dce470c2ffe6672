"""The command line: data to stdout, talk to stderr, errors with a hint."""

from .main import main

__all__ = ["main"]
