"""Fail-safe execution: the next device of a list takes over from one that fails."""
