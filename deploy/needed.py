"""Prints the packages that pyproject.toml in this folder asks for, with those of the extras named, one a line."""

import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
print(*project["dependencies"], *(package for name in sys.argv[1:] for package in extras[name]), sep="\n")
