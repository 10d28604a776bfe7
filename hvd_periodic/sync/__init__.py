"""The training cycle: startup, questions to the schedule, exchanges, checkpoints."""
