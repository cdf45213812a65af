"""Builds the compiled parts when the package is installed or packed, where there is a C compiler.

There are three: the kernel of the encodings, the copier of files, and the scan of pickles. Without a compiler the
install still succeeds: encodings are then computed with numpy, to the same bits, and `transaxle info` says so; steps of
the copier are done one by one, by numpy, xxhash and zlib, and pickles are read in Python. What is built is found beside
its source, so that it serves an editable install too; it is rebuilt when it is not of this source or cannot be loaded
here, and replaced at once, because a running process may have it open.

The README is also the page of the package, from where its links to files of this repository would lead nowhere: there
they lead to `[project.urls] Source`, and without it they are text.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

PACKAGE = Path("src/transaxle")
PARTS = {
    "encodings/arithmetic/kernel.c": "encodings will be computed with numpy, to the same bits",
    "formats/storage/copier.c": "steps will be done one by one: numpy will transpose, xxhash hash, and zlib sum up",
    "formats/pickled/scan.c": "the metadata of DCP folders will be read in Python, in ten times the time",
}
"""Sources, and what happens without them; `libNAME.so` is built beside `NAME.c`."""

FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
"""No fast-math: each operation rounds as IEEE 754 says. The last two drop the error flags, which nobody reads."""
VARIANTS = (("-DCLONES",), ())
"""Code for several processors in one library, and where the compiler has no such thing, for the oldest one alone."""


class KernelHook(BuildHookInterface[Any]):
    """Adds what is compiled to wheels, and makes wheels that hold it wheels of this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Build, unless what is there is up to date."""
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        made = [made for part in PARTS if (made := self.library(root, part)) is not None]
        if not made:
            return
        build_data["artifacts"] += [f"/{library.as_posix()}" for library in made]
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"

    def library(self, root: Path, part: str) -> Path | None:
        """Return the library of a source, built unless what is there is up to date; None where that fails."""
        source = PACKAGE / part
        found = source.with_name(f"lib{source.stem}.so")
        stamp = zlib.crc32((root / source).read_bytes())
        return found if up_to_date(root / found, stamp) or self.built(root, part, found, stamp) else None

    def built(self, root: Path, part: str, library: Path, stamp: int) -> bool:
        """Compile; say why, if that fails."""
        source, instead = root / PACKAGE / part, PARTS[part]
        command = compiler()
        if command is None:
            self.app.display_warning(f"no C compiler: {instead}")
            return False
        complaint = ""
        try:
            for variant in VARIANTS:
                with tempfile.TemporaryDirectory(dir=root / PACKAGE.parent, prefix=".build-") as place:
                    made = Path(place) / library.name
                    line = [*command, *FLAGS, *variant, f"-DSTAMP={stamp}u", str(source), "-o", str(made)]
                    done = subprocess.run(line, capture_output=True, text=True, check=False)
                    if done.returncode == 0 and up_to_date(made, stamp):
                        made.replace(root / library)
                        return True
                    complaint = done.stderr.strip() or "what it made cannot be loaded"
        except OSError as error:
            complaint = str(error)
        self.app.display_warning(f"{shlex.join(command)}: {complaint}")
        self.app.display_warning(instead)
        return False


class PageHook(MetadataHookInterface):
    """Adds the README as the page of the package."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add it, with links that work there."""
        text = Path(self.root, "README.md").read_text("utf-8")
        page = with_links(text, metadata.get("urls", {}).get("Source", ""), metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": page}


def with_links(text: str, source: str, version: str) -> str:
    """Return Markdown whose links and images lead to a released version of the files.

    Without a source, links become text and images their description.
    """

    def linked(match: re.Match[str]) -> str:
        image, words, path = match.groups()
        if source:
            return f"{image}[{words}]({source.rstrip('/')}/{'raw' if image else 'blob'}/v{version}/{path})"
        return words if image or words == path else f"{words} (`{path}`)"

    return re.sub(r"(!?)\[([^\]]+)\]\((?!\w+:|#)([^)\s]+)\)", linked, text)


def compiler() -> list[str] | None:
    """Return the command of the C compiler: $CC, or the first there is of cc, gcc and clang."""
    if said := os.environ.get("CC"):
        return shlex.split(said)
    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    return [found] if found else None


def up_to_date(library: Path, stamp: int) -> bool:
    """Whether a library can be loaded on this machine and was built from the source with this checksum."""
    try:
        found = ctypes.CDLL(str(library)).transaxle_stamp
    except (OSError, AttributeError):
        return False
    found.restype = ctypes.c_uint32
    return bool(found() == stamp)
