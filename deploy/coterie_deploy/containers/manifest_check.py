"""`coterie kubernetes --check`: manifests against the schemas of Kubernetes, and where a cluster answers kubectl, against its server."""

import shutil
import subprocess
from collections.abc import Iterator

import yaml

from coterie.errors import ConfigError
from coterie.extras import needed
from coterie_deploy.terminal.printable import printable

_ANSWER_S, _CHECK_S = 15, 120
_NOT_ASKED = "no cluster was asked, since"


def checked(text: str) -> Iterator[str]:
    """What has been checked, and what could not be, in sentences. ConfigError for the first mistake."""
    validator = needed("kubernetes_validate", "kubernetes", "--check needs kubernetes-validate")
    documents = [document for document in yaml.safe_load_all(text) if document is not None]
    version = ".".join(validator.latest_version().split(".")[:2])
    for document in documents:
        try:
            validator.validate(document, version, strict=True)
        except validator.ValidationError as error:
            place = ".".join(map(str, error.path))
            named = f"{document['kind']} {document['metadata']['name']}"
            raise ConfigError(f"{named} is not valid by the schemas of Kubernetes {version}, at {place}: {error.message}") from None
    yield f"{len(documents)} manifests are valid by the schemas of Kubernetes {version}"
    yield _by_a_cluster(text)


def _by_a_cluster(text: str) -> str:
    """What the server of kubectl's context says. ConfigError when it refuses a manifest; nothing is applied."""
    if shutil.which("kubectl") is None:
        return f"{_NOT_ASKED} kubectl is not installed"
    try:
        code, said = _kubectl(["version"], "", _ANSWER_S)
        if code:
            return f"{_NOT_ASKED} none answers kubectl: {said}"
        code, said = _kubectl(["apply", "--dry-run=server", "-f", "-"], text, _CHECK_S)
    except subprocess.TimeoutExpired as error:
        return f"{_NOT_ASKED} kubectl did not answer within {error.timeout:g} s"
    if code:
        raise ConfigError(f"the cluster of kubectl's context refuses a manifest: {said}")
    return "the cluster of kubectl's context would take them all"


def _kubectl(words: list[str], text: str, seconds: float) -> tuple[int, str]:
    """Its exit code, and the last line of what it says is wrong."""
    command = ["kubectl", *words, f"--request-timeout={seconds // 2:g}s"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=seconds, check=False)  # noqa: S603
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return done.returncode, printable(lines[-1])
