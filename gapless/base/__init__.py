"""Records and rules that every room shares. Imports nothing of ours."""
