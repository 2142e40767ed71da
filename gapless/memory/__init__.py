"""Ownership and reuse of pages and rows. Bookkeeping over integers: no torch here."""
