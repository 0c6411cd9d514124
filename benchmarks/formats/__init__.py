"""How files of other tools are read, over whole sets of files."""
