"""Read and write other tools' configurations; the only package that knows their names.

`tools` has one module or package per tool.
"""
