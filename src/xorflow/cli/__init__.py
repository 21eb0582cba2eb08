"""The command line: the only package that prints or exits."""

from xorflow.cli.app import main

__all__ = ["main"]
