"""The course of training: how it begins, what schedules are asked, when ranks exchange, what is saved and restored."""
