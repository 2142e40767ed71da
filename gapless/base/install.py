"""The command that installs gapless, for messages. No package index has it: the name there is another project's."""

from __future__ import annotations

INSTALL = "pip install the file of gapless's wheel, or '.' in a checkout of it"
"""Brings all that the engine needs."""
