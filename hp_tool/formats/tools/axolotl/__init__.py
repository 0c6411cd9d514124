"""axolotl 0.21: its YAML file, read and written."""
