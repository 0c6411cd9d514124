"""What `hp-tool batch` is made of: queries in (JSON lines, YAML, CSV grids), answers by processes or a server, answers out."""
