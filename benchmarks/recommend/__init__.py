"""Compare recommendations with layouts that experts chose, and with measurements."""
