"""Durable message delivery for crash-prone agent sessions, on Postgres, across hosts."""

__version__ = "0.1.0"
