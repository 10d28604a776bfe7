"""The code blocks of README and documentation, run as they stand."""
