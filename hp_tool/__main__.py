"""`python -m hp_tool` runs the command `hp-tool`."""

from hp_tool.cli.main import main

if __name__ == "__main__":
    main()
