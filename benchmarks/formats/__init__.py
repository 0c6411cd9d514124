"""Reading files of other tools, over whole sets of files."""
