"""The form of a new search, with the cost model's answer as the user types."""
