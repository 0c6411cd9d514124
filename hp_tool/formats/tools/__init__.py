"""Tools whose configurations are read or written: one module or package each, which registers its
`Format`.
"""
