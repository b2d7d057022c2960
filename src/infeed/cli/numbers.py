"""Argument types for numbers on the command line."""

import argparse

__all__ = ["count", "samples", "seconds", "workers"]


def seconds(text: str) -> float:
    """Parse a finite number of seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number; give seconds") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no time; give more than 0 seconds")
    return value


def count(text: str) -> int:
    """Parse a whole number of at least 1."""
    return _at_least(1, text, "")


def samples(text: str) -> int:
    """Parse the number of samples in a batch, at least 1."""
    return _at_least(1, text, " of samples")


def workers(text: str) -> int:
    """Parse a number of workers, at least 0."""
    return _at_least(0, text, " of workers")


def _at_least(least: int, text: str, of_what: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no number{of_what}; give {least} or more")
    return int(text)
