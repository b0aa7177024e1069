"""Sizes in bytes."""

MIB = 1 << 20
GIB = 1 << 30
