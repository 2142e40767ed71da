"""Prints the dependencies of the pyproject.toml in this folder, and of the extras that are named, one on each line."""

import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
print(*project["dependencies"], *(package for name in sys.argv[1:] for package in extras[name]), sep="\n")
