"""A new search: a form over the query's own schema, answered by the cost model while one types."""
