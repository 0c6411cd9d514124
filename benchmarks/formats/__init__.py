"""Check imports over sets of public files."""
