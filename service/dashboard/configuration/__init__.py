"""One configuration on a page, and two side by side."""
