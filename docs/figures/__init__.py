"""The figures of the documentation, from recordings of real runs: ``python -m docs.figures.draw``."""
