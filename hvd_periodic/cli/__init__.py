"""The command line: ``hvdp``, or ``python -m hvd_periodic``; one file per command."""
