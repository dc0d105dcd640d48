"""Child processes: how they start, talk, die, and are ended. Nothing in here but `tensors` imports torch."""
