"""What ranks add locally where one of them is stopped in the middle of a push; see ``asynchronous_scenarios.py``."""


def local_steps(rank: int, push: int) -> list[float]:
    """Return what a rank adds to nine numbers before a push."""
    return [(1.0 + rank) * (1 + push) * number / 8 for number in range(1, 10)]
