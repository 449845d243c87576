"""A run looked at afterwards: one HTML file that needs nothing but a browser."""
