"""Tools whose configurations are read or written: a module or package each, which registers its
`Format`.
"""
