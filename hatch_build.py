"""Builds the compiled kernel when the package is installed or packed, where there is a C compiler.

Without one the install still succeeds: encodings are then computed with numpy, to the same bits, and `transaxle info`
says so. What is built is found beside its source, so that it serves an editable install too; it is rebuilt when it is
not of this source or cannot be loaded here, and replaced in one step, because a running process may have it open.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("src/transaxle/encodings")
SOURCE = FOLDER / "kernel.c"
LIBRARY = FOLDER / "libkernel.so"

FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
"""No fast-math: each operation rounds as IEEE 754 says. The last two drop the error flags, which nobody reads."""
VARIANTS = (("-DCLONES",), ())
"""Code for several processors in one library, and where the compiler has no such thing, for the oldest one alone."""


class KernelHook(BuildHookInterface):
    """Adds the kernel to wheels, and makes wheels that hold it wheels of this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Build, unless what is there is up to date."""
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        stamp = zlib.crc32((root / SOURCE).read_bytes())
        if not up_to_date(root / LIBRARY, stamp) and not self.built(root, stamp):
            return
        build_data["artifacts"].append(f"/{LIBRARY}")
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"

    def built(self, root: Path, stamp: int) -> bool:
        """Compile; say why, if that fails."""
        command = compiler()
        if command is None:
            self.app.display_warning("no C compiler: encodings will be computed with numpy, to the same bits")
            return False
        complaint = ""
        try:
            for variant in VARIANTS:
                with tempfile.TemporaryDirectory(dir=root / FOLDER.parent.parent, prefix=".build-") as place:
                    made = Path(place) / LIBRARY.name
                    line = [*command, *FLAGS, *variant, f"-DSTAMP={stamp}u", str(root / SOURCE), "-o", str(made)]
                    done = subprocess.run(line, capture_output=True, text=True, check=False)
                    if done.returncode == 0 and up_to_date(made, stamp):
                        made.replace(root / LIBRARY)
                        return True
                    complaint = done.stderr.strip() or "what it made cannot be loaded"
        except OSError as error:
            complaint = str(error)
        self.app.display_warning(f"{shlex.join(command)}: {complaint}")
        self.app.display_warning("encodings will be computed with numpy, to the same bits")
        return False


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
