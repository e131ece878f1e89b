"""`coterie dashboard`: a small web application over the run databases below a folder, read-only. Extra `dashboard`."""
