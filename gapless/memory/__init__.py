"""Ownership of pages and rows, and when each may be used again. Bookkeeping over integers: no torch here."""
