"""The parts of `hp-tool batch`: the queries, their answers, and the output."""
