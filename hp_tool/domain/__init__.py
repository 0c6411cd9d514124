"""Domain objects: frozen, keyword-only dataclasses, and ports of the store and the launchers."""
