"""Recommendations against what experts chose and what was measured."""
