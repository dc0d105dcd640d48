"""Kills processes of a server under load, many times, and looks at what is left."""
