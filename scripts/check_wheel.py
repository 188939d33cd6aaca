"""Checks that a built wheel holds what its users rely on, and nothing that is ours alone."""

from __future__ import annotations

import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

NEEDED = (
    "smg_grpc_servicer/py.typed",
    "smg_wire/py.typed",
    "{info}/METADATA",
    "{info}/entry_points.txt",
    "{info}/licenses/LICENSE",
)
ALLOWED_ROOTS = ("smg_grpc_servicer", "smg_wire")


def complaints(wheel: Path) -> list[str]:
    """Return a line for each thing that is wrong with a wheel."""
    name, version = wheel.name.split("-")[:2]
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        members = set(archive.namelist())
        metadata = HeaderParser().parsestr(archive.read(f"{info}/METADATA").decode())
    needed = [pattern.format(info=info) for pattern in NEEDED]
    found = [f"{member} is missing" for member in needed if member not in members]
    roots = {member.split("/")[0] for member in members} - {info, *ALLOWED_ROOTS}
    found += [f"{root} does not belong in it" for root in sorted(roots)]
    if metadata["Version"] != version or metadata["Name"] != "smg-grpc-servicer":
        found.append(f"METADATA names {metadata['Name']} {metadata['Version']}")
    if not str(metadata.get_payload()).strip():
        found.append("METADATA has no description")
    return found


def main() -> int:
    """Check the wheel that the command line names."""
    found = complaints(Path(sys.argv[1]))
    for complaint in found:
        print(f"{sys.argv[1]}: {complaint}", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
