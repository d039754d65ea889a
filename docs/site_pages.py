"""Plug-in functions of mkdocs: pages from outside ``docs/`` join the site, and links between pages work as in the repository."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
_LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LATER_CELL = re.compile(r"(?<=</td>)\s*<td\b.*?</td>", re.DOTALL)
_CODE = re.compile(r"<code>[^<]*</code>")
_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):<code>~?([\w.]+)</code>")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages in the repository's root folder, and the READMEs of the examples, to the site."""
    root = Path(config.config_file_path).parent
    examples = {str(path.relative_to(root)): str(path.relative_to(root)) for path in root.glob("examples/*/README.md")}
    for path, uri in {**_ROOT_PAGES, **examples}.items():
        files.append(File.generated(config, uri, abs_src_path=str(root / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links to files of the repository into links to pages of the site."""
    root = Path(config.config_file_path).parent
    path = str(Path(page.file.abs_src_path).relative_to(root))
    pages = {
        str(Path(f.abs_src_path).relative_to(root)): f.src_uri for f in files if f.abs_src_path.startswith(str(root))
    }

    def on_site(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link[1]))
        if target not in pages:
            return link[0]
        return posixpath.relpath(pages[target], posixpath.dirname(page.file.src_uri) or ".") + (link[2] or "")

    parts = _FENCE.split(markdown)
    fences = [*_FENCE.findall(markdown), ""]
    return "".join(_LINK.sub(on_site, part) + fence for part, fence in zip(parts, fences, strict=True))


def on_page_content(html: str, **_: Any) -> str:
    """Turn Sphinx roles from docstrings (``:class:`~a.b.C```) into links.

    Long names in a table may break after a "_", but for those of the first column.
    """
    html = _ROLE.sub(
        lambda r: f'<autoref identifier="{r[1]}" optional><code>{r[1].split(".")[-1]}</code></autoref>', html
    )
    return _LATER_CELL.sub(lambda cell: _CODE.sub(lambda code: code[0].replace("_", "_<wbr>"), cell[0]), html)
