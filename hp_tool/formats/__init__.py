"""Read and write the configurations of other tools; only this package knows those tools' names.

`tools` has one module or package for each tool.
"""
