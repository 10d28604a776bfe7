"""Asynchronous exchange: one center, which every worker reads and moves on its own clock.

``center_in_memory`` implements one transaction on a center in memory: read c, form d from the value read, add α d. A
``ledger`` next to it counts the pushes. A ``transport`` runs a worker's transactions: in memory that all workers share,
or through a service thread of the rank that holds the center. In ``slots``, transactions in shared memory are whole,
wherever workers are stopped.
"""
