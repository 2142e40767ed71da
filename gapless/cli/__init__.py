"""Commands: flags in, the rooms below put to work. Nothing heavy is imported before a command runs."""
