"""Checks an sdist and a wheel against the tree they come from: ``python -m tests.distributions TREE SDIST WHEEL``.

The sdist has every file of the tree but what serves the repository alone, the wheel the package and nothing else, and
the metadata of both are valid and say the same.
"""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from pathlib import Path

from packaging.metadata import Metadata

OF_THE_REPOSITORY = re.compile(r"\.(?!/)")
"""Files and folders whose names begin with a dot."""

OF_THE_BUILD = re.compile(r"PKG-INFO$|hvd_periodic\.egg-info/")


def files_of(tree: Path) -> dict[str, bytes]:
    """Return what a folder holds, but what Python leaves there."""
    paths = [path for path in tree.rglob("*") if path.is_file() and path.parent.name != "__pycache__"]
    return {path.relative_to(tree).as_posix(): path.read_bytes() for path in paths}


def unpacked(sdist: Path) -> dict[str, bytes]:
    """Return what an sdist holds, without its top folder."""
    with tarfile.open(sdist) as archive:
        members = [member for member in archive if member.isfile()]
        files = [archive.extractfile(member) for member in members]
        return {member.name.partition("/")[2]: file.read() for member, file in zip(members, files, strict=True) if file}


def metadata(content: bytes) -> Metadata:
    """Return what a file of metadata says; it has to be valid, and to know nothing that the format does not."""
    return Metadata.from_email(content, validate=True)


def differences(expected: dict[str, bytes], found: dict[str, bytes]) -> list[str]:
    """Return the names of files that only one has, or that differ."""
    return sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))


def main(tree: Path, sdist: Path, wheel: Path) -> None:
    """Exit with a message where something is not right."""
    project = {name: text for name, text in files_of(tree).items() if not OF_THE_REPOSITORY.match(name)}
    source = unpacked(sdist)
    with zipfile.ZipFile(wheel) as archive:
        built = {name: archive.read(name) for name in archive.namelist()}
    information = metadata(source["PKG-INFO"])
    (described,) = (built.pop(name) for name in list(built) if name.endswith(".dist-info/METADATA"))
    package = {name: text for name, text in built.items() if ".dist-info/" not in name}
    wrong = {
        "the sdist, which MANIFEST.in describes": differences(
            project | {"setup.cfg": source["setup.cfg"]},  # The build appends to it.
            {name: text for name, text in source.items() if not OF_THE_BUILD.match(name)},
        ),
        "the wheel": differences({n: text for n, text in project.items() if n.startswith("hvd_periodic/")}, package),
        "metadata": [] if described == source["PKG-INFO"] else ["METADATA and PKG-INFO"],
    }
    for what, names in wrong.items():
        if names:
            raise SystemExit(f"{what}: not as in the tree: {', '.join(names)}")
    if information.description_content_type != "text/markdown" or not information.description:
        raise SystemExit("metadata: the description is not README.md")
    print(f"{information.name} {information.version}: {len(source)} files of source, {len(package)} of the package")
    print(f"extras: {', '.join(information.provides_extra or [])}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
