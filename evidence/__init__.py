"""Published measurements that predictions are fitted to and checked against, as CSV files."""
