"""Known vulnerabilities of what is installed, by pip-audit.

Ends with 1 if there are any. Where no advisory service answers, nothing was audited: that is said, and ends with 0.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from pydantic import BaseModel


class Vulnerability(BaseModel):
    id: str
    fix_versions: list[str] = []


class Package(BaseModel):
    name: str
    version: str | None = None
    vulns: list[Vulnerability] = []
    skip_reason: str | None = None  # None: the service knows the package


class Audit(BaseModel):
    dependencies: list[Package]

    def findings(self) -> list[str]:
        return [
            f"{package.name} {package.version}: {found.id}, mended in {', '.join(found.fix_versions) or 'no version'}"
            for package in self.dependencies
            for found in package.vulns
        ]

    def summary(self) -> str:
        unknown = [package.name for package in self.dependencies if package.skip_reason]
        num_known = len(self.dependencies) - len(unknown)
        if not num_known:
            return f"SKIPPED: no advisory service answers for any of {len(unknown)} packages; nothing was audited"
        names = f" ({', '.join(unknown)})" if unknown else ""
        return f"{num_known} packages audited, {len(self.findings())} vulnerabilities, {len(unknown)} unknown{names}"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "audit.json"
        options = ["--skip-editable", "--progress-spinner", "off", "--timeout", "15", "--format", "json"]
        command = [sys.executable, "-m", "pip_audit", *options, "--output", str(report)]
        done = subprocess.run(command, capture_output=True, text=True)
        if not report.is_file():
            is_away = "ConnectionError" in done.stderr or "Timeout" in done.stderr
            last_line = done.stderr.strip().rpartition("\n")[2]
            print(
                f"SKIPPED: no advisory service can be reached; nothing was audited ({last_line})"
                if is_away
                else done.stderr
            )
            return 0 if is_away else 1
        audit = Audit.model_validate_json(report.read_text())
    for finding in audit.findings():
        print(finding)
    print(audit.summary())
    return 1 if audit.findings() else 0


if __name__ == "__main__":
    sys.exit(main())
