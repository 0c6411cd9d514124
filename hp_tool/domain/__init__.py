"""Domain objects: frozen, keyword-only dataclasses, and the ports to the store and the
launchers.
"""
