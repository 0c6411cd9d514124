"""Read and write the configurations of other tools. Only this package refers to tools by name.

`tools` has one module or package per tool.
"""
