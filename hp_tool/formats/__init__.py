"""Other tools' configurations, both ways; the only room that knows foreign names. One module or
folder per tool in `tools`.
"""
