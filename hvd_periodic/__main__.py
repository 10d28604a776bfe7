"""``python -m hvd_periodic`` runs ``hvdp``."""

from hvd_periodic.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
