"""Other tools' configurations, both ways: a chosen configuration as their flags and files, and theirs as a query.

The only room that knows foreign names. One module per tool, for a named version of it.
"""
