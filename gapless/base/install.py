"""What installs gapless, for messages. It is on no package index: who asks one for its name gets another's."""

from __future__ import annotations

INSTALL = "pip install the file of gapless's wheel, or '.' in a checkout of it"
"""Brings all that the engine needs."""
