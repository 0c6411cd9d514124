"""Generate recipes of the catalogue from a table of the presets in Megatron Bridge's releases."""
