"""Asynchronous exchange: one center, which every worker reads and moves on its own clock.

Of a center in memory, ``center_in_memory`` knows what one transaction does to it: read c, form d from what was read,
add α d. A ``transport`` gets a worker's transactions done: in memory that all share, or by a service thread of whoever
holds it.
"""
