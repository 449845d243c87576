"""The report of a run or of several: one HTML file that needs nothing but a browser."""
