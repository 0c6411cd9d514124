"""What measurements taught: per cluster the error before and after, its drift, outliers, and the runs behind it."""
