"""Plan: not written yet."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing."""


def run(arguments: argparse.Namespace) -> int:
    """Do nothing."""
    return 0
