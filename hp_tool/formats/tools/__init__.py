"""One module or package per tool, which registers the tool's `Format`s."""
