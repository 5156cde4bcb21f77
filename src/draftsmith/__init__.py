"""Trains EAGLE-3 draft models for any large language model, and proves each step before it costs GPU hours."""

__version__ = "0.1.0"
