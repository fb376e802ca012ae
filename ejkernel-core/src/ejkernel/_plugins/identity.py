"""Is a distribution that bears the name of one of ours the one whose code would be imported?

Names alone prove nothing: a folder that comes earlier on the path may hold another distribution of the same name, or a package of
the same name as ours. So three things must agree: the entry point names the plugin module that ours has, the package that Python
would import lies beside the running core, and otherwise the distribution itself lists that file as its own and is the only one of
its name on the path. Nothing is imported to find out.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from urllib.parse import unquote, urlparse
from urllib.request import url2pathname

from importlib_metadata import Distribution

from ejkernel.plugin import FIRST_PARTY


def complaint(platform: str, distribution: Distribution, value: str, others: list[str]) -> str | None:
    """Why a first-party name is not taken at its word; None if it is.

    Args:
        platform: the reserved platform name that it claims.
        distribution: one that bears the owner's name.
        value: what its entry point names.
        others: folders of other distributions of the same name.
    """
    owner, package = FIRST_PARTY[platform], f"ejkernel_{platform}"
    if value.strip() != f"{package}._plugin":
        return f"its entry point names {value!r}, and the plugin module of {owner} is '{package}._plugin'; uninstall it"
    file = _file_of(package)
    if file is None or _is_beside_core(file, owner):
        return None  # a package that is missing is reported when it is imported
    if not _owns(distribution, file):
        return f"{package} would be imported from {file.parent}, which is no part of it; remove that folder from the path"
    if others:
        return f"{file.parent} may be another's: distributions named {owner} lie in {', '.join(others)} too; keep one"
    return None


def _file_of(package: str) -> Path | None:
    """The file that importing a package would run."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module without a spec, put into sys.modules by hand
        return Path(f"{package} in sys.modules", "__init__.py")
    if spec is None:
        return None
    return Path(spec.origin).resolve() if spec.origin else Path(f"{package} without __init__.py", "__init__.py")


def _is_beside_core(file: Path, owner: str) -> bool:
    """Whether a package's file lies where core's own package lies, or at its place in the source tree that core runs from."""
    core = Path(__file__).resolve().parents[2]
    places = [core]
    if core.parts[-2:] == ("ejkernel-core", "src"):
        places.append(core.parents[1] / owner / "src")
    return file.parents[1] in places


def _owns(distribution: Distribution, file: Path) -> bool:
    """Whether a distribution's list of files, or the folder that it was installed from in editable mode, holds a file."""
    try:
        folder = _editable_folder(distribution.read_text("direct_url.json") or "")
        if folder is not None and file.is_relative_to(folder):
            return True
        return any(Path(str(distribution.locate_file(path))).resolve() == file for path in distribution.files or ())
    except (OSError, UnicodeError, ValueError, TypeError):
        return False


def _editable_folder(text: str) -> Path | None:
    stated = json.loads(text) if text else None
    if not isinstance(stated, dict) or not stated.get("dir_info", {}).get("editable"):
        return None
    return Path(url2pathname(unquote(urlparse(stated["url"]).path))).resolve()
