"""`python -m hp_tool` is the command `hp-tool`."""

from hp_tool.cli.main import main

if __name__ == "__main__":
    main()
