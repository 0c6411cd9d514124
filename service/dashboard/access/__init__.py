"""Keys and the audit log, for administrators."""
