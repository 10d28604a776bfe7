"""Elastic jobs: commits, backups and shards of the center when ranks come and go."""
