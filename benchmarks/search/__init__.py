"""The proof of the search: measured grids replayed, and a real search on this machine."""
