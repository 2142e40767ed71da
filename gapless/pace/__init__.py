"""The controllers: they measure a running engine and choose its paces. No torch here."""
