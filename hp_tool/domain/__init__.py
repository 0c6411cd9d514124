"""Frozen, keyword-only dataclasses that know nothing but the standard library."""
