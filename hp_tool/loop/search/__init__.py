"""Choose the few candidates to run, their order, and when to stop; effects go through ports."""
