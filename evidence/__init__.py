"""Published measurements, and the fits that derive the catalog's constants from them."""
