"""Models, GPUs and clusters: what queries may name, and the way to add one's own."""
