"""Site of the documentation, made by Sphinx from the repository's own Markdown: `make docs`."""

project = "volunteer"
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "packaging/README.md"]
myst_heading_anchors = 4  # links to headings, as a host of the repository makes them
html_title = "volunteer"
html_theme = "alabaster"  # comes with Sphinx and loads nothing from a network
html_sidebars = {"**": ["about.html", "searchbox.html", "localtoc.html"]}
html_show_sourcelink = False
# pages are reached from the index by its own links, not by a table of contents; code is read as
# people read it, whether or not a highlighter knows its language
suppress_warnings = ["toc.not_included", "misc.highlighting_failure"]
