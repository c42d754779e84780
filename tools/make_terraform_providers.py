"""Builds the Terraform providers of `terraform/` from their sources, as a mirror for where no registry is to be had.

The sources come through Go's module proxy, checked against Go's checksum database. What is built is a provider's own
code, left with the services that the modules use: with all of them the AWS one takes hours.
Standard library only: any Python 3.10+ runs it, with Go.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

MIRROR = Path(__file__).resolve().parent.parent / ".cache" / "terraform-providers"
IMAGES = ("/opt/*", "/usr/local/share/terraform/plugins", "/usr/share/terraform/plugins")
"""Where images of machines keep providers, in the same layout as MIRROR."""
REGISTRY = "registry.terraform.io/hashicorp"
BUILD_TIMEOUT_S = 7200
LOG_TAIL = 3000

# What no program is built from. The AWS provider's tests alone are half of its files.
UNUSED = shutil.ignore_patterns("*_test.go", "testdata", "test-fixtures", "website", ".github")


@dataclass(frozen=True)
class Provider:
    """A provider, and what is left of it.

    Attributes:
        name: as in `hashicorp/NAME`.
        source: the version of its Go module, of one commit: its releases are not in the form that Go has for versions.
        version: what that source is, by its own files.
        services: those that the modules use, and those that these import.
        lists: the generated files that name every service.
    """

    name: str
    source: str
    version: str
    services: frozenset[str]
    lists: tuple[str, ...]

    @property
    def module(self) -> str:
        return f"github.com/hashicorp/terraform-provider-{self.name}"

    def path(self, mirror: Path, platform: str) -> Path:
        """Where Terraform looks for it: HOST/NAMESPACE/TYPE/VERSION/PLATFORM/PROGRAM."""
        folder = mirror / REGISTRY / self.name / self.version / platform
        return folder / f"terraform-provider-{self.name}_v{self.version}"


PROVIDERS = (
    Provider(
        name="google",
        source="v1.20.1-0.20260828184646-f3721fb45fa3",
        version="8.0.0",
        services=frozenset({"kms", "monitoring", "resourcemanager", "storage"}),
        lists=("google/provider/provider_register_services.go",),
    ),
    Provider(
        name="aws",
        source="v1.60.1-0.20260602190131-5f2286d6d836",
        version="6.47.1",
        # Regions and partitions are in `meta`; s3 uses s3control, ec2 organizations, and that account.
        services=frozenset(
            {"account", "cloudwatch", "ec2", "eks", "iam", "kms", "meta", "organizations", "s3", "s3control", "sts"}
        ),
        lists=("internal/conns/awsclient_gen.go", "internal/provider/sdkv2/service_packages_gen.go"),
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("providers", nargs="*", metavar="NAME", help="of aws and google; default: both")
    wanted = parser.parse_args().providers
    if unknown := set(wanted) - {provider.name for provider in PROVIDERS}:
        parser.error(f"no such provider: {', '.join(sorted(unknown))}")
    go = shutil.which("go")
    if go is None:
        sys.stderr.write("make_terraform_providers: there is no Go toolchain to build them with\n")
        return 1
    platform = "_".join(_ran(go, "env", "GOOS", "GOARCH").split())
    for provider in PROVIDERS:
        if not wanted or provider.name in wanted:
            sys.stdout.write(f"{obtain(provider, go, platform)}\n")
    return 0


def obtain(provider: Provider, go: str, platform: str) -> Path:
    """The program in the mirror, built where it is not there yet."""
    path = provider.path(MIRROR, platform)
    if os.access(path, os.X_OK):
        return path
    services = ", ".join(sorted(provider.services))
    _say(f"building {provider.module} {provider.version} with {services}; this takes a while, once")
    MIRROR.mkdir(parents=True, exist_ok=True)
    # In the mirror's folder: a half-written program never carries the final name.
    with tempfile.TemporaryDirectory(dir=MIRROR.parent) as scratch:
        sources = Path(scratch) / "sources"
        # Not edited where Go keeps it: other builds share it, and its sums would no longer hold.
        shutil.copytree(_downloaded(provider, go, Path(scratch)), sources, ignore=UNUSED, copy_function=shutil.copyfile)
        for listed in provider.lists:
            file = sources / listed
            file.chmod(0o644)
            file.write_text(trimmed(file.read_text(), provider.services))
        built = Path(scratch) / path.name
        flags = f"-s -w -X {provider.module}/version.ProviderVersion={provider.version}"
        _ran(go, "build", "-modcacherw", "-buildvcs=false", "-ldflags", flags, "-o", str(built), ".", cwd=sources)
        path.parent.mkdir(parents=True, exist_ok=True)
        return built.replace(path)


def terraform_env(folder: Path) -> dict[str, str]:
    """The environment to run Terraform in: with the providers that were built or are on the machine, unless it has been
    told where to look.

    Its settings go to a file in `folder`, which has to be there as long as Terraform runs.
    """
    env = dict(os.environ)
    told = env.get("TF_CLI_CONFIG_FILE") or str(Path.home() / ".terraformrc")
    folders = [MIRROR, *(Path(found) for pattern in IMAGES for found in sorted(glob.glob(pattern)))]
    mirrors = {
        path: [f"{REGISTRY}/{provider.name}" for provider in sorted((path / REGISTRY).iterdir())]
        for path in folders
        if (path / REGISTRY).is_dir()
    }
    if mirrors and not Path(told).exists():
        named = sorted({provider for providers in mirrors.values() for provider in providers})
        blocks = [
            f"  filesystem_mirror {{\n    path = {json.dumps(str(path))}\n    include = {json.dumps(providers)}\n  }}\n"
            for path, providers in mirrors.items()
        ]
        # Without the exclusion it asks the registry for other versions too, and fails where that does not answer.
        blocks.append(f"  direct {{\n    exclude = {json.dumps(named)}\n  }}\n")
        settings = folder / "providers.tfrc"
        settings.write_text("provider_installation {\n" + "".join(blocks) + "}\n")
        env["TF_CLI_CONFIG_FILE"] = str(settings)
    return env


def trimmed(source: str, services: frozenset[str]) -> str:
    """A generated Go file without the services that are not named: imports, entries of lists, methods for clients."""
    for pattern in (
        r'^\t(?:\w+ )?"[^"\n]*/services?/(\w+)"\n',
        r"^\t+(\w+)\.ServicePackage\(ctx\),\n",
        r"^func [^\n]* \*(\w+)\.Client \{\n.*?^\}\n",
    ):
        source = re.sub(
            pattern, lambda found: found[0] if found[1] in services else "", source, flags=re.MULTILINE | re.DOTALL
        )
    return source


def _downloaded(provider: Provider, go: str, cwd: Path) -> Path:
    found = json.loads(
        _ran(go, "mod", "download", "-modcacherw", "-json", f"{provider.module}@{provider.source}", cwd=cwd)
    )
    return Path(found["Dir"])


def _ran(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        # A workspace of the user's must not decide what is built.
        env={**os.environ, "CGO_ENABLED": "0", "GOWORK": "off"},
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        raise SystemExit(
            f"make_terraform_providers: {' '.join(command)} failed:\n{(done.stderr or done.stdout)[-LOG_TAIL:]}"
        )
    return done.stdout


def _say(message: str) -> None:
    sys.stderr.write(f"make_terraform_providers: {message}\n")


if __name__ == "__main__":
    sys.exit(main())
