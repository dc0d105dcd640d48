"""Benchmarks that need more than Piecework itself."""
