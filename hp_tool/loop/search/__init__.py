"""Choose the few candidates to run, their order, and when to stop. All I/O goes through ports."""
