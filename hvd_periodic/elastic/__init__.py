"""Elastic jobs: commits, and backups and shards of the center when ranks join or leave."""
