"""Published measurements, and the fits of the catalog's constants on them."""
