"""Generated recipes: a table of what releases of Megatron Bridge set becomes rules of the
catalogue.
"""
