"""Other tools' configurations, both ways; the only room that knows foreign names. One module per tool and version."""
