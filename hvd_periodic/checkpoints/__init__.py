"""Checkpoint files: their content, how they are written and how they are found; independent of frameworks."""

from hvd_periodic.checkpoints.saving import Saving, save_set
from hvd_periodic.checkpoints.sets import Source, find_file
from hvd_periodic.checkpoints.tree import Content, Leaves, decode, encode

__all__ = ["Content", "Leaves", "Saving", "Source", "decode", "encode", "find_file", "save_set"]
