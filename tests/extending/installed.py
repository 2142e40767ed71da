"""Installs toys as a package: writes what pip would, which needs a network."""

from __future__ import annotations

from pathlib import Path

TOYS = Path(__file__).parent / "toys"


def install(folder: Path, group: str, **points: str) -> None:
    """Write the metadata of a package with these entry points; the folder belongs on the Python path, as do its
    modules."""
    info = folder / f"{group.replace('.', '_')}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {group}\nVersion: 1\n")
    lines = [f"{name} = {place}" for name, place in points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]))
