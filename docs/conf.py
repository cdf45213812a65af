"""Sphinx builds these pages; every build treats warnings as errors and runs the examples (`make docs`)."""

from transaxle import __version__ as _version

project = "Transaxle"
author = "The Transaxle contributors"
copyright = "The Transaxle contributors"
release = version = _version

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
]
myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_type_aliases = {"Code": "Code"}
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# Examples that write files do so in a folder of their own.
doctest_global_setup = """
import os, tempfile
_before, _here = os.getcwd(), tempfile.TemporaryDirectory()
os.chdir(_here.name)
"""
doctest_global_cleanup = """
os.chdir(_before)
_here.cleanup()
"""

html_theme = "furo"
html_title = f"Transaxle {release}"
html_copy_source = False
