"""Parts of `hp-tool batch`: reading queries and computing answers."""
