"""Lengths of time in seconds, and sizes in bytes as powers of two."""

from __future__ import annotations

MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86_400.0
MIB, GIB = 1 << 20, 1 << 30
