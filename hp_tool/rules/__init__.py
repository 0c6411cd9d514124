"""What a training query may say: combinations that mean nothing, or that nothing models, are refused by name."""

from __future__ import annotations
