"""Parts of `hp-tool batch`: reading queries and computing their answers."""
