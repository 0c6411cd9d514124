"""Sequential tests on step times: when a job became slower, by how much, which ranks. Pure."""
