"""Sphinx configuration of the site. `make docs` builds it without a network; warnings are errors."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_extension"))

from coterie import __version__ as release  # noqa: E402

project = "Coterie"
version = release
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "mathml", "signatures", "coterie_pages"]
myst_enable_extensions = ["attrs_block", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["README.md", "_build", "_extension"]
suppress_warnings = ["toc.not_included"]
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
maximum_signature_line_length = 70
python_display_short_literal_types = True
autodoc_member_order = "bysource"
default_role = "literal"  # names in docstrings
smartquotes = False  # options of commands keep both hyphens
html_theme = "furo"
html_title = f"Coterie {release}"
html_static_path = ["_static"]
html_css_files = ["coterie.css"]
html_show_sphinx = False
html_show_copyright = False
html_math_renderer = "mathml"
