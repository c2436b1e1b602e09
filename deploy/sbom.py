"""Write ``deploy/sbom.cdx.json``: what an image of ``deploy/Dockerfile`` holds, as a CycloneDX list.

    python deploy/sbom.py

Packages, releases and hashes are those of ``deploy/requirements.lock``; so the list is made without a network. Inside
the application itself is the library that draws the curves of ``collapipe watch``.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LOCK, SBOM = HERE / "requirements.lock", HERE / "sbom.cdx.json"
_PAGE_LIBRARY = HERE.parent / "flower_app" / "watch" / "page" / "uplot" / "uPlot.iife.min.js"
_PACKAGE = re.compile(r"^([A-Za-z0-9][\w.-]*)==([^\s;\\]+)(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)


def components(lock: str) -> list[dict[str, Any]]:
    """Read the packages of a lock file, with the hashes of all their files."""
    found = []
    for name, version, rest in _PACKAGE.findall(lock):
        hashes = sorted(set(re.findall(r"sha256:([0-9a-f]{64})", rest)))
        normal = re.sub(r"[-_.]+", "-", name).lower()
        purl = f"pkg:pypi/{normal}@{version.replace('+', '%2B')}"
        found.append(
            {
                "type": "library",
                "bom-ref": purl,
                "name": normal,
                "version": version,
                "purl": purl,
                "externalReferences": [
                    {
                        "type": "distribution",
                        "url": purl,
                        "hashes": [{"alg": "SHA-256", "content": content} for content in hashes],
                    }
                ],
            }
        )
    return found


def page_library() -> dict[str, Any]:
    """Read which release of uPlot the watch page has."""
    content = _PAGE_LIBRARY.read_bytes()
    version = re.search(r"uPlot \(v([\d.]+)\)", content.decode().splitlines()[0]).group(1)
    return {
        "type": "library",
        "bom-ref": f"pkg:npm/uplot@{version}",
        "name": "uplot",
        "version": version,
        "purl": f"pkg:npm/uplot@{version}",
        "licenses": [{"license": {"id": "MIT"}}],
        "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(content).hexdigest()}],
    }


def document(lock: str, project: dict[str, Any]) -> dict[str, Any]:
    """Make the CycloneDX document of a release."""
    listed = components(lock)
    own = f"pkg:pypi/{project['name']}@{project['version']}"
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": project["name"],
                "version": project["version"],
                "purl": own,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
                "components": [page_library()],
            }
        },
        "components": listed,
        "dependencies": [{"ref": own, "dependsOn": [component["bom-ref"] for component in listed]}],
    }


def text() -> str:
    """Return what the file has to hold."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return json.dumps(document(LOCK.read_text(encoding="utf-8"), project), indent=1) + "\n"


if __name__ == "__main__":
    SBOM.write_text(text(), encoding="utf-8")
