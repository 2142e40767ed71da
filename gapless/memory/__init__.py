"""Who holds which page and row, and when it may be used again. Bookkeeping over integers: no torch here."""
