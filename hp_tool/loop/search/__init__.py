"""Choose the few candidates to run, their order, and when to stop. All effects go through ports."""
