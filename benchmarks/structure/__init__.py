"""How much code there is, and how much of it decides: by folder, at a commit and now."""
